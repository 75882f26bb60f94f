"""The /v1/conversations endpoints."""

from collections.abc import Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from tercet.frontend.api.responses.conversation_schema import AddItems, CreateConversation, UpdateConversation
from tercet.frontend.api.responses.conversation_store import ConversationStore
from tercet.frontend.api.responses.input_schema import InputItem
from tercet.frontend.api.responses.items import Item, resolve_items
from tercet.frontend.api.responses.store import ResponseStore
from tercet.frontend.errors import NotFoundError
from tercet.frontend.http.auth import caller_of
from tercet.frontend.http.json_response import json_in_turn, json_response
from tercet.frontend.http.list_page import listed, page_query
from tercet.frontend.http.request_body import read_model
from tercet.frontend.http.route import Route


class OpenAIServingConversations:
    """Endpoints for conversations. They answer 404 on a server without a store."""

    def __init__(
        self, conversations: ConversationStore | None, responses: ResponseStore | None, body_limit: int
    ) -> None:
        self._conversations = conversations
        self._responses = responses
        self._body_limit = body_limit

    @property
    def routes(self) -> list[Route]:
        return [
            Route("POST", "/v1/conversations", self.create),
            Route("GET", "/v1/conversations/{conversation_id}", self.retrieve),
            Route("POST", "/v1/conversations/{conversation_id}", self.update),
            Route("DELETE", "/v1/conversations/{conversation_id}", self.delete),
            Route("POST", "/v1/conversations/{conversation_id}/items", self.add_items),
            Route("GET", "/v1/conversations/{conversation_id}/items", self.items),
            Route("GET", "/v1/conversations/{conversation_id}/items/{item_id}", self.item),
            Route("DELETE", "/v1/conversations/{conversation_id}/items/{item_id}", self.delete_item),
        ]

    async def create(self, request: Request) -> Response:
        """Create a conversation."""
        body = await read_model(request, CreateConversation, self._body_limit)
        owner = caller_of(request).owner
        items = await self._given(owner, body.items or ())
        return json_response(await self._store.create(owner, items, body.metadata or {}))

    async def retrieve(self, request: Request) -> Response:
        """Return a conversation without its items."""
        return json_response(await self._store.get(*_named(request)))

    async def update(self, request: Request) -> Response:
        """Replace the metadata of a conversation."""
        body = await read_model(request, UpdateConversation, self._body_limit)
        return json_response(await self._store.update(*_named(request), body.metadata or {}))

    async def delete(self, request: Request) -> Response:
        """Delete a conversation and its items."""
        owner, conversation = _named(request)
        await self._store.delete(owner, conversation)
        return json_response({"id": conversation, "object": "conversation.deleted", "deleted": True})

    async def add_items(self, request: Request) -> Response:
        """Append items to a conversation, and return them."""
        body = await read_model(request, AddItems, self._body_limit)
        owner, conversation = _named(request)
        items = await self._given(owner, body.items)
        await self._store.add(owner, conversation, items)
        return await json_in_turn(request, listed([(item["id"], item) for item in items]))

    async def items(self, request: Request) -> Response:
        """Return a page of the items of a conversation."""
        return await json_in_turn(request, await self._store.items(*_named(request), page_query(request)))

    async def item(self, request: Request) -> Response:
        """Return an item of a conversation."""
        return await json_in_turn(request, await self._store.item(*_named(request), request.path_params["item_id"]))

    async def delete_item(self, request: Request) -> Response:
        """Delete an item of a conversation, and return the conversation."""
        return json_response(await self._store.delete_item(*_named(request), request.path_params["item_id"]))

    @property
    def _store(self) -> ConversationStore:
        if self._conversations is None:
            raise NotFoundError("This server keeps no conversations: it was started without --response-store.")
        return self._conversations

    async def _given(self, owner: str, items: Sequence[InputItem]) -> list[Item]:
        if self._responses is None:
            raise NotFoundError("This server keeps no conversations: it was started without --response-store.")
        return await resolve_items(items, "items", partial(self._responses.item, owner))


def _named(request: Request) -> tuple[str, str]:
    """Return the owner and the id of the conversation."""
    return caller_of(request).owner, request.path_params["conversation_id"]
