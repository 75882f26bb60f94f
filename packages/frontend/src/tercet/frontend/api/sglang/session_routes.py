"""The /open_session and /close_session endpoints, and the prompts of /generate that continue a session."""

from collections.abc import Awaitable, Callable

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response

from tercet.frontend.api.sglang.session_schema import CloseSession, OpenSession, SessionParams
from tercet.frontend.api.sglang.session_store import SessionStore, Turn
from tercet.frontend.errors import BadRequestError, UnsupportedParameterError
from tercet.frontend.http.auth import caller_of
from tercet.frontend.http.request_body import read_model
from tercet.frontend.http.route import Route
from tercet.frontend.manager.req_state import Generation
from tercet.frontend.manager.request import GenerateRequest
from tercet.frontend.model.prompts import TextPrompt, TokenPrompt
from tercet.frontend.model.served_model import ServedModel
from tercet.protocol.messages.values import unpack_ints

OnFinished = Callable[[Generation], Awaitable[None]]
"""Called with a generation once all its choices have finished."""


class SessionRoutes:
    """Endpoints for sessions. They are unsupported on a server without a store."""

    def __init__(self, store: SessionStore | None, body_limit: int) -> None:
        self._session_store = store
        self._body_limit = body_limit

    @property
    def routes(self) -> list[Route]:
        return [
            Route("POST", "/open_session", self.open),
            Route("POST", "/close_session", self.close),
        ]

    async def open(self, request: Request) -> Response:
        """Open a session, and return its id."""
        body = await read_model(request, OpenSession, self._body_limit)
        session = await self._store.open(caller_of(request).owner, body.capacity_of_str_len, body.session_id)
        return Response(orjson.dumps(session), media_type="application/json")

    async def close(self, request: Request) -> Response:
        """Delete a session."""
        body = await read_model(request, CloseSession, self._body_limit)
        await self._store.close(caller_of(request).owner, body.session_id)
        return Response(b"null", media_type="application/json")

    async def continue_session(
        self, request: Request, params: SessionParams, work: GenerateRequest, model: ServedModel
    ) -> tuple[GenerateRequest, OnFinished]:
        """Return the request with the earlier tokens in its prompt, and a function that stores its turn.

        Raises ApiError.
        """
        if work.options.n != 1:
            raise BadRequestError("A turn of a session has one choice.", param="sampling_params.n")
        owner = caller_of(request).owner
        capacity, parent = await self._store.turn(owner, params.id, params.rid or None)
        tokenizer = model.files.tokenizer_sha
        if parent is not None and parent.tokenizer not in {None, tokenizer}:
            raise BadRequestError(
                f"The request '{parent.rid}' was of a model with another tokenizer than {model.name!r} has.",
                param="session_params.rid",
            )
        ids = await _own_ids(work, model, first=parent is None)
        if parent is not None:
            ids = _earlier_ids(parent, params) + ids
        if len(ids) > capacity:
            raise BadRequestError(
                f"The session has room for {capacity} tokens, and the prompt with all before it has {len(ids)}.",
                param="session_params.id",
            )

        async def keep(generation: Generation) -> None:
            [state] = generation.states
            turn = Turn(
                rid=state.rid,
                parent=parent.rid if parent else None,
                prompt_ids=list(unpack_ints(state.prompt_ids)),
                output_ids=list(state.choices[0].token_ids),
                tokenizer=tokenizer,
            )
            await self._store.add(owner, params.id, turn, replace=bool(params.replace))

        return msgspec.structs.replace(work, prompt=TokenPrompt(ids, param=work.prompt.param)), keep

    @property
    def _store(self) -> SessionStore:
        if self._session_store is None:
            raise UnsupportedParameterError("This server keeps no sessions: it was started without --response-store.")
        return self._session_store


def _earlier_ids(parent: Turn, params: SessionParams) -> list[int]:
    before = parent.prompt_ids if params.drop_previous_output else parent.prompt_ids + parent.output_ids
    return before[: params.offset] if params.offset else before


async def _own_ids(work: GenerateRequest, model: ServedModel, *, first: bool) -> list[int]:
    """Return the tokens of the prompt itself. A BOS token stands only before the first turn of a session."""
    match work.prompt:
        case TextPrompt() as prompt:
            prompt = msgspec.structs.replace(prompt, add_special_tokens=first)
            return await model.tokenize(prompt)
        case TokenPrompt() as prompt:
            ids = await model.tokenize(prompt)
            begin = model.tokenizer.encode("", add_special_tokens=True)[:1]
            return ids[1:] if not first and ids[:1] == begin else ids
        case _:
            raise AssertionError("/generate knows no chats")
