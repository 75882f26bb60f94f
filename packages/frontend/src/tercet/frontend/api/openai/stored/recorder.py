"""Writer that also stores the chat completion that it writes, streamed or whole."""

import logging
from collections.abc import Mapping
from typing import Any, Protocol

from tercet.frontend.api.generation_response import FinishedChoice, ResponseWriter
from tercet.frontend.api.openai.stored.chunk_merger import ChunkMerger
from tercet.frontend.api.openai.stored.store import StoredChat, StoredChats
from tercet.frontend.database import StoreError
from tercet.frontend.errors import ServerError
from tercet.frontend.http.loop_turns import Steps
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
    """Writer that passes everything on to another writer and keeps a copy of the completion.

    `request_fields` are fields of the request that the stored completion repeats.
    """

    def __init__(
        self,
        writer: ChatResponseWriter,
        request_fields: Mapping[str, Any],
        messages: list[dict[str, Any]],
        metadata: Mapping[str, str],
    ) -> None:
        self._writer = writer
        self._request_fields = request_fields
        self._messages = messages
        self._metadata = metadata
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

    async def save(self, store: StoredChats, owner: str, generation: Generation) -> None:
        """Store the finished completion. Raises ServerError."""
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
            await store.save(owner, chat)
        except StoreError as error:
            logger.error("response store failed: completion=%s error=%s", chat.id, error)
            raise ServerError(str(error)) from error
