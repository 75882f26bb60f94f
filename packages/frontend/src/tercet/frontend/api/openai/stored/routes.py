"""The endpoints of stored chat completions."""

import orjson
from starlette.requests import Request
from starlette.responses import Response

from tercet.frontend.api.openai.sampling_schema import Metadata, Strict
from tercet.frontend.api.openai.stored.store import ChatFilter, StoredChats
from tercet.frontend.errors import NotFoundError
from tercet.frontend.http.auth import caller_of
from tercet.frontend.http.json_response import json_in_turn
from tercet.frontend.http.list_page import page_query
from tercet.frontend.http.query import pairs
from tercet.frontend.http.request_body import read_model
from tercet.frontend.http.route import Route

_MAX_PAIRS = 16
"""Entries of metadata that a list can be filtered by: as many as a completion can have."""


class UpdateChatCompletion(Strict):
    """New metadata of a stored chat completion."""

    metadata: Metadata | None


class OpenAIServingStoredChats:
    """Endpoints for stored chat completions. They answer 404 on a server without a store."""

    def __init__(self, stored: StoredChats | None, body_limit: int) -> None:
        self._stored = stored
        self._body_limit = body_limit

    @property
    def routes(self) -> list[Route]:
        return [
            Route("GET", "/v1/chat/completions", self.list),
            Route("GET", "/v1/chat/completions/{completion_id}", self.retrieve),
            Route("POST", "/v1/chat/completions/{completion_id}", self.update),
            Route("DELETE", "/v1/chat/completions/{completion_id}", self.delete),
            Route("GET", "/v1/chat/completions/{completion_id}/messages", self.messages),
        ]

    async def list(self, request: Request) -> Response:
        """Return a page of the stored completions, filtered by model and metadata."""
        wanted = ChatFilter(request.query_params.get("model"), pairs(request, "metadata", _MAX_PAIRS))
        found = await self._store.page(caller_of(request).owner, wanted, page_query(request, "asc"))
        return await json_in_turn(request, found)

    async def retrieve(self, request: Request) -> Response:
        """Return a stored completion."""
        return await json_in_turn(request, orjson.Fragment(await self._store.get(*_named(request))))

    async def update(self, request: Request) -> Response:
        """Replace the metadata of a stored completion, and return it."""
        body = await read_model(request, UpdateChatCompletion, self._body_limit)
        found = await self._store.update(*_named(request), body.metadata or {})
        return await json_in_turn(request, orjson.Fragment(found))

    async def delete(self, request: Request) -> Response:
        """Delete a stored completion and its messages."""
        owner, completion = _named(request)
        await self._store.delete(owner, completion)
        return await json_in_turn(request, {"id": completion, "object": "chat.completion.deleted", "deleted": True})

    async def messages(self, request: Request) -> Response:
        """Return a page of the messages of the request that a stored completion answers."""
        return await json_in_turn(request, await self._store.messages(*_named(request), page_query(request, "asc")))

    @property
    def _store(self) -> StoredChats:
        if self._stored is None:
            raise NotFoundError("This server stores no chat completions: it was started without --response-store.")
        return self._stored


def _named(request: Request) -> tuple[str, str]:
    """Return the owner and the id of the completion."""
    return caller_of(request).owner, request.path_params["completion_id"]
