"""Anthropic's /v1/messages and /v1/messages/count_tokens."""

import logging
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tercet.frontend.api.anthropic.conversation import messages_of, tool_description
from tercet.frontend.api.anthropic.schema import CountTokens, CreateMessage, Prompted
from tercet.frontend.api.anthropic.writer import Change, MessageWriter
from tercet.frontend.api.openai.sampling_schema import sampling_values
from tercet.frontend.chat.chat_request import Calls, ChatOptions, ToolChoice
from tercet.frontend.chat.planner import ChatPlan, ChatPlanner
from tercet.frontend.constraints import JsonSchema
from tercet.frontend.errors import ApiError, BadRequestError, ServerError
from tercet.frontend.http.error_format import anthropic_error
from tercet.frontend.http.json_response import json_response
from tercet.frontend.http.request_body import read_model
from tercet.frontend.http.request_id import request_id_of
from tercet.frontend.http.route import Route
from tercet.frontend.http.sse import EventStream, cancel_on_disconnect, named_event
from tercet.frontend.json_number import dump_json
from tercet.frontend.manager.inputs.images import tokenize
from tercet.frontend.manager.req_state import Generation
from tercet.frontend.manager.request import GenerationOptions, ParamNames
from tercet.frontend.manager.tokenizer_manager import TokenizerManager
from tercet.frontend.model.served_model import ServedModel
from tercet.frontend.parsers.port import ToolSpec

logger = logging.getLogger(__name__)

_NAMES = ParamNames(
    stop="stop_sequences", reasoning_effort="output_config.effort", thinking_budget="thinking.budget_tokens"
)
_CALLS = {"auto": Calls.AUTO, "any": Calls.REQUIRED, "tool": Calls.REQUIRED, "none": Calls.NONE}


class AnthropicServingMessages:
    """Endpoints for messages. The headers for API versions and betas are ignored."""

    def __init__(self, manager: TokenizerManager, planner: ChatPlanner, body_limit: int) -> None:
        self._manager = manager
        self._planner = planner
        self._body_limit = body_limit

    @property
    def routes(self) -> list[Route]:
        return [
            Route("POST", "/v1/messages", self.create),
            Route("POST", "/v1/messages/count_tokens", self.count_tokens),
        ]

    async def create(self, request: Request) -> Response:
        """Generate a message."""
        body = await read_model(request, CreateMessage, self._body_limit)
        model = await self._manager.adapters.model(body.model)
        options = GenerationOptions(
            sampling=sampling_values(body, model.files.defaults),
            max_tokens=body.max_tokens,
            stop=body.stop_sequences or [],
            param_names=_NAMES,
        )
        plan = await self._plan(body, options, model)
        include_thinking = body.thinking is None or body.thinking.display != "omitted"
        rid = self._manager.new_id()
        writer = MessageWriter(f"msg_{rid}", body.model, include_thinking=include_thinking)
        generation = await cancel_on_disconnect(request, self._manager.submit([plan.request], rid))
        changes = _changes(plan, writer, generation)
        if not body.stream:
            generation.notify_on_finish_only()
        try:
            first = await cancel_on_disconnect(request, anext(changes))
            if body.stream:
                events = _events(first, changes, request_id_of(request.scope))
                return EventStream(events, on_close=lambda: self._manager.release(generation))
            await cancel_on_disconnect(request, _exhaust(changes))
        except BaseException:
            self._manager.release(generation)
            raise
        self._manager.release(generation)
        return json_response(writer.body)

    async def count_tokens(self, request: Request) -> Response:
        """Return the number of prompt tokens of a message."""
        body = await read_model(request, CountTokens, self._body_limit)
        model = await self._manager.adapters.model(body.model)
        plan = await self._plan(body, GenerationOptions(param_names=_NAMES), model)
        ids = await tokenize(self._manager, plan.request.prompt, model)
        return json_response({"input_tokens": len(ids)})

    async def _plan(self, body: Prompted, options: GenerationOptions, model: ServedModel) -> ChatPlan:
        chat = _chat_options(body, options)
        try:
            return await self._planner.plan(chat, model)
        except BadRequestError as error:
            if error.param is not None and error.param.startswith("messages["):  # places in the chat, not in the body
                error.param = "messages"
            raise


def _chat_options(body: Prompted, options: GenerationOptions) -> ChatOptions:
    """Return the chat options for a prompt. A final assistant message is continued."""
    thinking, config, choice = body.thinking, body.output_config, body.tool_choice
    schema = config.format.schema_ if config and config.format else None
    last = body.messages[-1]
    continues = last.role == "assistant"
    if continues and not isinstance(last.content, str) and any(block.type != "text" for block in last.content):
        where = f"messages[{len(body.messages) - 1}].content"
        raise BadRequestError("Only text of the assistant's can be gone on with.", param=where)
    return ChatOptions(
        messages=messages_of(body.system, body.messages),
        options=options,
        tools=tuple(
            ToolSpec(
                tool.name,
                tool.input_schema,
                tool_description(tool),
                bool(tool.strict),
                param=f"tools.{place}.input_schema",
            )
            for place, tool in enumerate(body.tools or ())
        ),
        tool_choice=ToolChoice(_CALLS[choice.type], frozenset({choice.name}) if choice.name else None)
        if choice
        else ToolChoice(),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        constraint=JsonSchema(schema=schema, param="output_config.format.schema") if schema is not None else None,
        reasoning_effort=_effort(body),
        # In this API the effort concerns the whole response, and Claude Code always sends it.
        effort_needs_reasoning=False,
        # In this API a model reasons only on request.
        thinking=thinking is not None and thinking.type != "disabled",
        thinking_budget=thinking.budget_tokens if thinking else None,
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )


def _effort(body: Prompted) -> str | None:
    """Return the reasoning effort. Reasoning that is disabled by name is off for models that always reason, too."""
    if body.thinking is not None and body.thinking.type == "disabled":
        return "none"
    return body.output_config.effort if body.output_config else None


async def _changes(plan: ChatPlan, writer: MessageWriter, generation: Generation) -> AsyncIterator[list[Change]]:
    """Yield the changes of each update. Raises ApiError."""
    [reader] = plan.readers(generation)
    started = False
    async for arrivals in generation.arrivals():
        changes = [] if started else writer.begin(_usage(generation, reader.reasoning_tokens))
        started = True
        for update in (arrival.update for arrival in arrivals):
            changes += writer.add(reader.read(update))
            if update.finish is not None:
                changes += writer.end(update.finish, _usage(generation, reader.reasoning_tokens))
        yield changes


async def _exhaust(changes: AsyncIterator[list[Change]]) -> None:
    async for _ in changes:
        pass


async def _events(first: list[Change], rest: AsyncIterator[list[Change]], request_id: str) -> AsyncIterator[bytes]:
    try:
        yield b"".join(map(_encoded, first))
        async for changes in rest:
            yield b"".join(map(_encoded, changes))
    except ApiError as error:
        yield named_event("error", anthropic_error(error, request_id))
    except Exception:
        logger.exception("http stream failed: request_id=%s", request_id)
        yield named_event("error", anthropic_error(ServerError("The server failed this request."), request_id))


def _encoded(change: Change) -> bytes:
    return named_event(change["type"], dump_json(change))


def _usage(generation: Generation, thinking_tokens: int) -> dict[str, Any]:
    """Return the token counts in this API's format. Cached tokens are not among the input tokens."""
    cached = generation.cached_tokens
    return {
        "input_tokens": generation.prompt_tokens - cached,
        "cache_creation": {"ephemeral_1h_input_tokens": 0, "ephemeral_5m_input_tokens": 0},
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "inference_geo": None,
        "output_tokens": generation.output_tokens,
        "output_tokens_details": {"thinking_tokens": thinking_tokens},
        "server_tool_use": None,
        "service_tier": "standard",
    }
