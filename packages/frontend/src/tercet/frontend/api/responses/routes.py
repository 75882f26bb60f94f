"""The /v1/responses endpoints."""

import logging
import time
from collections.abc import AsyncIterator, Callable

from starlette.requests import Request
from starlette.responses import Response

from tercet.frontend.api.responses.background import BackgroundWorker
from tercet.frontend.api.responses.body import id_of, page, rid_of
from tercet.frontend.api.responses.conversation_store import ConversationStore
from tercet.frontend.api.responses.draft import Draft, Origin, ResponseDrafter, new_seed
from tercet.frontend.api.responses.event_log import EventLog, encoded
from tercet.frontend.api.responses.output_items import Change
from tercet.frontend.api.responses.schema import CreateResponse, TokenCount
from tercet.frontend.api.responses.store import ResponseStore
from tercet.frontend.api.responses.writer import ResponseObjectWriter
from tercet.frontend.chat.planner import ChatPlanner
from tercet.frontend.database import StoreError
from tercet.frontend.errors import ApiError, BadRequestError, NotFoundError, ServerError, UnsupportedParameterError
from tercet.frontend.http.auth import caller_of
from tercet.frontend.http.json_response import json_in_turn, json_response
from tercet.frontend.http.list_page import page_query
from tercet.frontend.http.query import flag, number
from tercet.frontend.http.request_body import read_model
from tercet.frontend.http.route import Route
from tercet.frontend.http.sse import EventStream, cancel_on_disconnect
from tercet.frontend.manager.inputs.images import tokenize
from tercet.frontend.manager.req_state import Generation
from tercet.frontend.manager.tokenizer_manager import TokenizerManager

logger = logging.getLogger(__name__)


class OpenAIServingResponses:
    """Endpoints for responses. Without a store, responses cannot be retrieved later."""

    def __init__(
        self,
        manager: TokenizerManager,
        planner: ChatPlanner,
        store: ResponseStore | None,
        background: BackgroundWorker | None,
        conversations: ConversationStore | None,
        body_limit: int,
    ) -> None:
        self._manager = manager
        self._responses = store
        self._background = background
        self._drafter = ResponseDrafter(manager, planner, store, conversations)
        self._body_limit = body_limit

    @property
    def routes(self) -> list[Route]:
        return [
            Route("POST", "/v1/responses", self.create),
            Route("POST", "/v1/responses/input_tokens", self.input_tokens),
            Route("GET", "/v1/responses/{response_id}", self.retrieve),
            Route("DELETE", "/v1/responses/{response_id}", self.delete),
            Route("POST", "/v1/responses/{response_id}/cancel", self.cancel),
            Route("GET", "/v1/responses/{response_id}/input_items", self.input_items),
        ]

    async def create(self, request: Request) -> Response:
        """Generate a response."""
        body = await read_model(request, CreateResponse, self._body_limit)
        if body.store and self._responses is None:
            raise UnsupportedParameterError("This server stores no responses.", param="store")
        owner = caller_of(request).owner
        seed = new_seed() if body.seed is None else body.seed
        origin = Origin(id_of(self._manager.new_id()), int(time.time()), seed, body)
        draft = await self._drafter.draft(owner, origin)
        if body.background:
            return await self._start_background(owner, origin, draft)
        foreground = _ForegroundResponse(self._manager, draft, owner, self._responses)
        return await (foreground.stream(request) if body.stream else foreground.full_response(request))

    async def retrieve(self, request: Request) -> Response:
        """Return a response, or with `stream=true` the events of a background response."""
        owner, response = caller_of(request).owner, request.path_params["response_id"]
        background = self._background
        if background is None or not flag(request, "stream"):
            return json_response(await self._store.get(owner, response))
        after = number(request, "starting_after", -1, lowest=0, highest=2**31 - 1)
        leave = background.join(owner)  # a refusal reads nothing from the store
        try:
            if not (await self._store.get(owner, response))["background"]:
                message = "Only a response that was made in the background can be streamed."
                raise BadRequestError(message, param="stream")
        except BaseException:
            leave()
            raise
        return self._follow(background, owner, response, after, leave)

    async def cancel(self, request: Request) -> Response:
        """Cancel a background response."""
        response = request.path_params["response_id"]
        body = await self._store.cancel(caller_of(request).owner, response)
        if self._background is not None:
            self._background.stop(response)
        return json_response(body)

    async def delete(self, request: Request) -> Response:
        """Delete a response."""
        response = request.path_params["response_id"]
        await self._store.delete(caller_of(request).owner, response)
        if self._background is not None:
            self._background.stop(response)
        return json_response({"id": response, "object": "response", "deleted": True})

    async def input_items(self, request: Request) -> Response:
        """Return a page of the input items of a response."""
        items = await self._store.input_items(caller_of(request).owner, request.path_params["response_id"])
        return await json_in_turn(request, page(items, page_query(request)))

    async def input_tokens(self, request: Request) -> Response:
        """Return the number of prompt tokens of a response."""
        body = await read_model(request, TokenCount, self._body_limit)
        plan, model = await self._drafter.prompt(caller_of(request).owner, body)
        ids = await tokenize(self._manager, plan.request.prompt, model)
        return json_response({"object": "response.input_tokens", "input_tokens": len(ids)})

    @property
    def _store(self) -> ResponseStore:
        if self._responses is None:
            raise NotFoundError("This server stores no responses: it was started without --response-store.")
        return self._responses

    async def _start_background(self, owner: str, origin: Origin, draft: Draft) -> Response:
        if self._background is None:
            raise UnsupportedParameterError("This server stores no responses to make in the background.", param="store")
        if not origin.request.stream:
            return json_response(await self._background.submit(owner, origin, draft))
        leave = self._background.join(owner)
        try:
            await self._background.submit(owner, origin, draft)
        except BaseException:
            leave()
            raise
        return self._follow(self._background, owner, origin.id, -1, leave)

    def _follow(
        self, background: BackgroundWorker, owner: str, response: str, after: int, leave: Callable[[], None]
    ) -> Response:
        """Return the stream of events; `leave` is called at its end."""

        async def events() -> AsyncIterator[bytes]:
            number = after + 1
            try:
                async for data in background.follow(owner, response, after):
                    yield data
                    number += 1
            except ApiError as error:  # deleted, expired, or pruned for space
                yield encoded(
                    {
                        "type": "error",
                        "code": error.code,
                        "message": error.message,
                        "param": error.param,
                        "sequence_number": number,
                    }
                )

        return EventStream(events(), on_close=leave)


class _ForegroundResponse:
    """A response that its client waits for."""

    def __init__(self, manager: TokenizerManager, draft: Draft, owner: str, store: ResponseStore | None) -> None:
        self._manager = manager
        self._draft = draft
        self._owner = owner
        self._store = store
        self._writer = ResponseObjectWriter(draft.body)

    async def full_response(self, request: Request) -> Response:
        """Return the complete response."""
        generation = await cancel_on_disconnect(
            request, self._manager.submit([self._draft.plan.request], rid_of(self._draft.body["id"]))
        )
        try:
            await cancel_on_disconnect(request, self._collect(generation))
        finally:
            self._manager.release(generation)
        await self._save()
        return json_response(self._writer.body)

    async def stream(self, request: Request) -> Response:
        """Return the stream of events. Errors before the first token raise ApiError."""
        generation = await cancel_on_disconnect(
            request, self._manager.submit([self._draft.plan.request], rid_of(self._draft.body["id"]))
        )
        changes = self._draft.changes(self._writer, generation)
        begin = self._writer.begin()
        try:
            first = await cancel_on_disconnect(request, anext(changes))
        except BaseException:
            self._manager.release(generation)
            raise
        return EventStream(self._events([*begin, *first], changes), lambda: self._manager.release(generation))

    async def _collect(self, generation: Generation) -> None:
        # Log-probabilities are written as tokens arrive, because all at once would take long.
        if not self._draft.wants_logprobs:
            generation.notify_on_finish_only()
        async for _ in self._draft.changes(self._writer, generation):
            pass

    async def _events(self, first: list[Change], rest: AsyncIterator[list[Change]]) -> AsyncIterator[bytes]:
        log = EventLog()
        try:
            yield await self._encode(log, first)
            async for changes in rest:
                yield await self._encode(log, changes)
        except ApiError as error:
            yield await self._encode(log, self._writer.fail(error))
        except Exception:
            logger.exception("http stream failed: response=%s", self._writer.body["id"])
            yield _encoded(log, self._writer.fail(ServerError("The server failed this response.")))

    async def _encode(self, log: EventLog, changes: list[Change]) -> bytes:
        """Return encoded events. The response is stored before the last one, so that the client can retrieve it then.

        If it cannot be stored, the last event reports that, unless it reports a failure already.
        """
        if self._writer.ended:
            try:
                await self._save()
            except StoreError as error:
                logger.error("response store failed: response=%s error=%s", self._writer.body["id"], error)
                if self._writer.body["status"] != "failed":
                    changes = [*changes[:-1], *self._writer.fail(ServerError(str(error)))]
        return _encoded(log, changes)

    async def _save(self) -> None:
        body, initial = self._writer.body, self._draft.initial
        if self._store is not None and (body["store"] or body["conversation"]):
            await self._store.save(self._owner, body, initial.given, initial.seen)


def _encoded(log: EventLog, changes: list[Change]) -> bytes:
    return b"".join(map(encoded, log.add(changes)))
