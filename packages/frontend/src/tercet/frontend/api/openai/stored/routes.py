"""The endpoints of stored chat completions."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tercet.frontend.api.openai.sampling_schema import Metadata, Strict
from tercet.frontend.api.openai.stored.store import ChatFilter, PageQuery, StoredChats
from tercet.frontend.errors import NotFoundError
from tercet.frontend.http.auth import caller_of
from tercet.frontend.http.loop_turns import turns_of
from tercet.frontend.http.query import number, order, pairs
from tercet.frontend.http.request_body import read_model
from tercet.frontend.http.route import Route
from tercet.frontend.json_number import dump_json

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
        return await _json(request, await self._store.page(caller_of(request).owner, wanted, _page(request)))

    async def retrieve(self, request: Request) -> Response:
        """Return a stored completion."""
        return await _json(request, await self._store.get(*_named(request)))

    async def update(self, request: Request) -> Response:
        """Replace the metadata of a stored completion, and return it."""
        body = await read_model(request, UpdateChatCompletion, self._body_limit)
        return await _json(request, await self._store.update(*_named(request), body.metadata or {}))

    async def delete(self, request: Request) -> Response:
        """Delete a stored completion and its messages."""
        owner, completion = _named(request)
        await self._store.delete(owner, completion)
        return await _json(request, {"id": completion, "object": "chat.completion.deleted", "deleted": True})

    async def messages(self, request: Request) -> Response:
        """Return a page of the messages of the request that a stored completion answers."""
        return await _json(request, await self._store.messages(*_named(request), _page(request)))

    @property
    def _store(self) -> StoredChats:
        if self._stored is None:
            raise NotFoundError("This server stores no chat completions: it was started without --response-store.")
        return self._stored


def _named(request: Request) -> tuple[str, str]:
    """Return the owner and the id of the completion."""
    return caller_of(request).owner, request.path_params["completion_id"]


def _page(request: Request) -> PageQuery:
    limit = number(request, "limit", 20, lowest=1, highest=100)
    return PageQuery(limit, request.query_params.get("after"), order(request, "asc"))


async def _json(request: Request, value: dict[str, Any] | bytes) -> Response:
    """Write completions, which may be long, in a turn of the event loop."""
    await turns_of(request).turn(caller_of(request).owner)
    body = value if isinstance(value, bytes) else dump_json(value)
    return Response(body, media_type="application/json")
