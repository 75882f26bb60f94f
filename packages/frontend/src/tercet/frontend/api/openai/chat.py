"""The /v1/chat/completions endpoint."""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from tercet.frontend.api.generation_response import respond
from tercet.frontend.api.openai.chat_messages import message_of
from tercet.frontend.api.openai.chat_schema import ChatRequest, chat_request
from tercet.frontend.api.openai.chat_writer import ChatWriter
from tercet.frontend.api.openai.parsed_chat_writer import ParsedChatWriter
from tercet.frontend.api.openai.stored.recorder import ChatRecorder, ChatResponseWriter
from tercet.frontend.api.openai.stored.store import StoredChats
from tercet.frontend.api.openai.structured_schema import constraint_of
from tercet.frontend.api.openai.tool_schema import functions_param
from tercet.frontend.chat.chat_request import ChatOptions
from tercet.frontend.chat.planner import ChatPlanner
from tercet.frontend.chat.template_variables import check_names
from tercet.frontend.errors import ApiError, UnsupportedParameterError
from tercet.frontend.http.request_body import read_model
from tercet.frontend.http.route import Route
from tercet.frontend.manager.request import ParamNames
from tercet.frontend.manager.tokenizer_manager import TokenizerManager
from tercet.frontend.model.served_model import ServedModel
from tercet.frontend.structured_output.limits import MAX_FREE_TOKENS
from tercet.protocol.messages.values import LogprobParams


class OpenAIServingChat:
    """OpenAI's Chat Completions endpoint."""

    def __init__(
        self, manager: TokenizerManager, body_limit: int, planner: ChatPlanner, stored: StoredChats | None = None
    ) -> None:
        self._manager = manager
        self._stored = stored
        self._body_limit = body_limit
        self._planner = planner
        self._schema = chat_request(planner.reasoning_field)

    @property
    def routes(self) -> list[Route]:
        return [Route("POST", "/v1/chat/completions", self.create)]

    async def create(self, request: Request) -> Response:
        """Generate chat completions."""
        body = await read_model(request, self._schema, self._body_limit)
        if body.store and self._stored is None:
            raise UnsupportedParameterError("This server stores no chat completions.", param="store")
        try:
            return await self._create(request, body)
        except ApiError as error:
            if body.uses_functions and error.param is not None:
                error.param = functions_param(error.param)
            raise

    async def _create(self, request: Request, body: ChatRequest) -> Response:
        model = await self._manager.adapters.model(body.model)
        plan = await self._planner.plan(to_chat_options(body, model), model)
        rid = self._manager.new_id()
        writer: ChatResponseWriter = ChatWriter(rid, body, model)
        if plan.reads:
            writer = ParsedChatWriter(rid, body, model, plan, self._planner.reasoning_field)
        send = partial(respond, request, self._manager, [plan.request], stream=bool(body.stream), rid=rid)
        if not body.store:
            return await send(writer)
        assert self._stored is not None
        recorder = ChatRecorder(writer, self._stored, request, body, plan)
        return await send(recorder, on_written=recorder.save)


def to_chat_options(body: ChatRequest, model: ServedModel) -> ChatOptions:
    """Return the chat options of a request. Raises BadRequestError."""
    max_tokens, max_tokens_param = body.output_limit
    continues = bool(body.continue_final_message)
    requested = body.add_generation_prompt
    budget, budget_param = _thinking_budget(body)
    effort, effort_param = _reasoning_effort(body)
    kwargs = body.chat_template_kwargs or {}
    check_names(kwargs, model.files.template)
    return ChatOptions(
        messages=[message_of(message) for message in body.messages],
        tools=body.specs(),
        tool_choice=body.choice(),
        parallel_tool_calls=body.allows_parallel_calls,
        constraint=constraint_of(body),
        reasoning_effort=effort,
        thinking=body.thinks,
        thinking_budget=budget,
        template_kwargs=kwargs,
        add_generation_prompt=not continues if requested is None else requested,
        continue_final_message=continues,
        options=body.options(
            model.files.defaults,
            max_tokens=max_tokens,
            logprobs=_logprobs(body),
            prediction=body.prediction.text if body.prediction else "",
            param_names=ParamNames(
                max_tokens=max_tokens_param,
                thinking_budget=budget_param,
                reasoning_effort=effort_param,
                logprobs="logprobs" if body.logprobs else "prompt_logprobs",
            ),
        ),
    )


def _reasoning_effort(body: ChatRequest) -> tuple[str | None, str]:
    """Return the reasoning effort, and the parameter that set it. Disabled reasoning means no effort."""
    if body.reasoning_effort is None and body.thinks is False:
        return "none", "thinking" if body.thinking else "enable_thinking"
    return body.reasoning_effort, "reasoning_effort"


def _logprobs(body: ChatRequest) -> LogprobParams | None:
    """Return the parameters for schedulers. One number of alternatives serves prompt and output."""
    scored = body.prompt_logprobs is not None
    if not body.logprobs and not scored:
        return None
    return LogprobParams(top=max(body.top_logprobs or 0, body.prompt_logprobs or 0), prompt=scored)


def _thinking_budget(body: ChatRequest) -> tuple[int | None, str]:
    """Return the maximum number of reasoning tokens, and the parameter that set it."""
    if body.thinking_token_budget is None:
        requested = (body.chat_template_kwargs or {}).get("thinking_budget")
        if isinstance(requested, int) and not isinstance(requested, bool) and 0 <= requested <= MAX_FREE_TOKENS:
            return requested, "chat_template_kwargs.thinking_budget"
    return body.thinking_token_budget, "thinking_token_budget"
