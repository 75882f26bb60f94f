"""Preparation of responses: from a request to its items, its chat plan and its events."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from tercet.frontend.api.openai.sampling_schema import sampling_values, stop_strings
from tercet.frontend.api.responses.body import new_body, usage_of
from tercet.frontend.api.responses.conversation_store import ConversationSnapshot, ConversationStore
from tercet.frontend.api.responses.items import Item, messages_of, resolve_items, to_stored_item
from tercet.frontend.api.responses.output_items import Change
from tercet.frontend.api.responses.schema import (
    CreateResponse,
    JsonObjectFormat,
    JsonSchemaFormat,
    Prompted,
    missing_input_error,
)
from tercet.frontend.api.responses.scored_text import ScoredText
from tercet.frontend.api.responses.store import ResponseStore
from tercet.frontend.api.responses.tool_schema import choice_of, specs_of
from tercet.frontend.api.responses.writer import ResponseObjectWriter
from tercet.frontend.chat.chat_request import ChatOptions
from tercet.frontend.chat.planner import ChatPlan, ChatPlanner
from tercet.frontend.constraints import Constraint, JsonObject, JsonSchema
from tercet.frontend.errors import BadRequestError, NotFoundError
from tercet.frontend.manager.req_state import Generation
from tercet.frontend.manager.request import GenerationOptions, ParamNames
from tercet.frontend.manager.tokenizer_manager import TokenizerManager
from tercet.frontend.model.served_model import ServedModel
from tercet.protocol.messages.values import LogprobParams

_NAMES = ParamNames(
    messages="input", max_tokens="max_output_tokens", logprobs="top_logprobs", reasoning_effort="reasoning.effort"
)


class InitialItems(msgspec.Struct, frozen=True):
    """Input items of a response, and the items of its conversation, when it was first started."""

    given: list[Item]
    past: ConversationSnapshot | None

    @property
    def seen(self) -> int:
        """Return the place in the conversation of the first item that the response has not seen."""
        return self.past.end if self.past else 0


class Origin(msgspec.Struct, frozen=True):
    """The data from which a response can be started again with the same result."""

    id: str
    created: int
    seed: int
    request: CreateResponse
    initial: InitialItems | None = None


_TOKENS_PER_TURN = 32
"""Tokens with log-probabilities that are parsed before other tasks of the loop run."""


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """A response that is ready to be generated."""

    plan: ChatPlan
    initial: InitialItems
    body: dict[str, Any]
    model: ServedModel
    wants_logprobs: bool

    async def changes(self, writer: ResponseObjectWriter, generation: Generation) -> AsyncIterator[list[Change]]:
        """Yield the changes of each update. Raises ApiError."""
        [reader] = self.plan.readers(generation)
        scored = self._scored()
        started = False
        async for arrivals in generation.arrivals():
            changes = [] if started else writer.progress()
            started = True
            for update in (arrival.update for arrival in arrivals):
                for place, part in enumerate(scored.split(update) if scored else [update], 1):
                    events = reader.read(part)
                    changes += writer.add(
                        events, scored.logprobs_for(events, reader.reasoning_tokens) if scored else ()
                    )
                    if place % _TOKENS_PER_TURN == 0:
                        yield changes
                        changes = []
                        await asyncio.sleep(0)  # let other tasks run: many tokens may have come
                if update.finish is not None:
                    usage = usage_of(generation, reader.reasoning_tokens)
                    rest = scored.rest(update.finish) if scored else ()
                    changes += writer.end(update.finish.type, usage, int(time.time()), rest)
            yield changes

    def _scored(self) -> ScoredText | None:
        if not self.wants_logprobs:
            return None
        hidden = self.model.tokenizer.special_ids if self.plan.request.options.skip_special_tokens else frozenset[int]()
        return ScoredText(self.model.files.token_bytes, hidden)


class ResponseDrafter:
    """Builder of drafts. Without stores, requests cannot refer to earlier responses or conversations."""

    def __init__(
        self,
        manager: TokenizerManager,
        planner: ChatPlanner,
        store: ResponseStore | None,
        conversations: ConversationStore | None,
    ) -> None:
        self._manager = manager
        self._planner = planner
        self._store = store
        self._conversations = conversations

    async def draft(self, owner: str, origin: Origin) -> Draft:
        """Return the draft of a response. Raises ApiError."""
        request = origin.request
        model = await self._manager.adapters.model(request.model)
        initial = origin.initial or await self._initial_items(owner, request)
        options = GenerationOptions(
            sampling=sampling_values(request, model.files.defaults),
            max_tokens=request.max_output_tokens,
            min_tokens=request.min_tokens or 0,
            seed=origin.seed,
            stop=stop_strings(request.stop),
            ignore_eos=bool(request.ignore_eos),
            logprobs=LogprobParams(top=request.top_logprobs or 0) if request.wants_logprobs else None,
            priority=request.priority or 0,
            cache_salt=request.cache_salt or "",
            param_names=_NAMES,
        )
        return Draft(
            plan=await self._plan(await self._chat_options(owner, request, initial, options), model),
            initial=initial,
            body=new_body(origin.id, request, options.sampling, origin.created, stored=self._store is not None),
            model=model,
            wants_logprobs=request.wants_logprobs,
        )

    async def prompt(self, owner: str, request: Prompted) -> tuple[ChatPlan, ServedModel]:
        """Return the plan and the model of a request, to count its tokens. Raises ApiError."""
        model = await self._manager.adapters.model(request.model)
        initial, options = await self._initial_items(owner, request), GenerationOptions(param_names=_NAMES)
        return await self._plan(await self._chat_options(owner, request, initial, options), model), model

    async def _initial_items(self, owner: str, request: Prompted) -> InitialItems:
        """Return the new items of a request, and those of its conversation. Raises ApiError."""
        past = None
        if request.conversation_id is not None:
            if self._conversations is None:
                raise NotFoundError("This server keeps no conversations to go on with.", param="conversation")
            past = await self._conversations.snapshot(owner, request.conversation_id)
        given = await self._given(owner, request)
        if past is not None:
            past.check_room(given)
            if not (past.items or given):
                raise missing_input_error()
        return InitialItems(given, past)

    async def _chat_options(
        self, owner: str, request: Prompted, initial: InitialItems, options: GenerationOptions
    ) -> ChatOptions:
        """Return the chat options for the items and all items before them."""
        earlier = initial.past.items if initial.past else []
        if request.previous_response_id is not None:
            earlier = await self._history(owner, request.previous_response_id)
        return ChatOptions(
            messages=messages_of(earlier, initial.given, request.instructions),
            options=options,
            tools=tuple(specs_of(request.tools or ())),
            tool_choice=choice_of(request.tool_choice),
            parallel_tool_calls=request.allows_parallel_calls,
            constraint=_constraint(request),
            reasoning_effort=request.reasoning.effort if request.reasoning else None,
        )

    async def _history(self, owner: str, response: str) -> list[Item]:
        if self._store is None:
            raise BadRequestError(
                "This server stores no responses to go on from.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return await self._store.history(owner, response)

    async def _given(self, owner: str, request: Prompted) -> list[Item]:
        if isinstance(request.input, str):
            return [to_stored_item({"type": "message", "role": "user", "content": request.input})]

        async def find(item: str) -> Item | None:
            return await self._store.item(owner, item) if self._store else None

        return await resolve_items(request.input or (), "input", find)

    async def _plan(self, options: ChatOptions, model: ServedModel) -> ChatPlan:
        try:
            return await self._planner.plan(options, model)
        except BadRequestError as error:
            if error.param is not None and error.param.startswith("messages"):  # made from the items of `input`
                error.param = "input"
            raise


def new_seed() -> int:
    """Return a random seed for a request without one, because a resumed response must sample the same tokens."""
    return secrets.randbits(63)


def _constraint(request: Prompted) -> Constraint | None:
    match request.text and request.text.format:
        case JsonObjectFormat():
            return JsonObject(param="text.format")
        case JsonSchemaFormat() as schema_format:
            return JsonSchema(
                schema=schema_format.schema_,
                strict=bool(schema_format.strict),
                name=schema_format.name,
                param="text.format.schema",
            )
    return None
