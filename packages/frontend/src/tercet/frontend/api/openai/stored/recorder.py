"""Writer that also stores the chat completion that it writes, streamed or whole."""

import logging
from collections.abc import Mapping
from typing import Any, Protocol

from starlette.requests import Request

from tercet.frontend.api.generation_response import FinishedChoice, ResponseWriter
from tercet.frontend.api.openai.chat_schema import ChatRequest
from tercet.frontend.api.openai.stored.chunk_merger import ChunkMerger
from tercet.frontend.api.openai.stored.record import request_record, stored_messages
from tercet.frontend.api.openai.stored.store import StoredChat, StoredChats
from tercet.frontend.chat.planner import ChatPlan
from tercet.frontend.database import StoreError
from tercet.frontend.errors import ServerError
from tercet.frontend.http.auth import caller_of
from tercet.frontend.http.loop_turns import Steps, turns_of
from tercet.frontend.json_number import dump_json
from tercet.frontend.manager.req_state import Generation, GenerationUpdate, ReqState

logger = logging.getLogger(__name__)


class ChatResponseWriter(ResponseWriter, Protocol):
    """Writer of chat completions."""

    @property
    def head(self) -> Mapping[str, Any]:
        """Return the fields that all chunks of the completion share."""
        ...

    def usage(self, generation: Generation) -> dict[str, Any]:
        """Return the token counts so far."""
        ...


class ChatRecorder:
    """Writer that passes everything on to another writer and keeps a copy of the completion."""

    def __init__(
        self, writer: ChatResponseWriter, store: StoredChats, request: Request, body: ChatRequest, plan: ChatPlan
    ) -> None:
        self._writer = writer
        self._store = store
        self._request = request
        self._request_fields = request_record(body, plan, request)
        self._messages = stored_messages(body)
        self._metadata = body.metadata or {}
        self._chunks = ChunkMerger()
        self._body = b""

    def prepare(self, state: ReqState) -> Steps[None]:
        return self._writer.prepare(state)

    def events(self, generation: Generation, arrivals: list[GenerationUpdate]) -> bytes:
        """Return the other writer's events."""
        events = self._writer.events(generation, arrivals)
        self._chunks.add(events)
        return events

    def end(self, generation: Generation) -> bytes:
        return self._writer.end(generation)

    def full_response(self, generation: Generation, choices: list[FinishedChoice]) -> Steps[bytes]:
        """Return the other writer's response."""
        self._body = yield from self._writer.full_response(generation, choices)
        return self._body

    async def save(self, generation: Generation) -> None:
        """Store the finished completion. Raises ServerError.

        Its log-probabilities may be long, so they are copied in a turn of the event loop.
        """
        owner = caller_of(self._request).owner
        await turns_of(self._request).turn(owner)
        body = self._body or self._chunks.completion(self._writer.usage(generation))
        head = self._writer.head
        chat = StoredChat(
            id=head["id"],
            created=head["created"],
            model=head["model"],
            metadata=self._metadata,
            body=body[:-1] + b"," + dump_json(self._request_fields)[1:],
            messages=[dump_json(message) for message in self._messages],
        )
        try:
            await self._store.save(owner, chat)
        except StoreError as error:
            logger.error("response store failed: completion=%s error=%s", chat.id, error)
            raise ServerError(str(error)) from error
