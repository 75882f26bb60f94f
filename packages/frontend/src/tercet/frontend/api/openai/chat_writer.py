"""Fast writer of chat responses that are plain text: most chunks are built without intermediate objects."""

import orjson

from tercet.frontend.api.generation_response import FinishedChoice
from tercet.frontend.api.openai.chat_chunks import ChatChunks
from tercet.frontend.api.openai.chat_schema import ChatRequest
from tercet.frontend.http.loop_turns import Steps, no_steps
from tercet.frontend.manager.req_state import Generation, GenerationUpdate, ReqState, Update
from tercet.frontend.model.served_model import ServedModel


class ChatWriter:
    """Writer of chat answers without parsing, for speed."""

    def __init__(self, rid: str, body: ChatRequest, model: ServedModel) -> None:
        self._builder = ChatChunks(rid, body, model)
        self._started: set[int] = set()

    def events(self, generation: Generation, arrivals: list[GenerationUpdate]) -> bytes:
        """Return a chunk for each choice with new tokens. The first one of a choice carries the role."""
        if self._builder.continuous_usage:
            self._builder.set_usage(generation)
        return b"".join([self._events_of(generation, arrival.update) for arrival in arrivals])

    def _events_of(self, generation: Generation, update: Update) -> bytes:
        builder, chunks = self._builder, b""
        if update.index in self._started:
            if update.text and update.finish is None and not (builder.has_logprobs or builder.has_ids):
                return builder.text_chunk(update.index, orjson.dumps(update.text))
        else:
            self._started.add(update.index)
            role = b'{"role":"assistant","content":"","refusal":null}'
            chunks = builder.first_chunk(generation, update.index, role)
        if not (update.text or update.finish or builder.has_logprobs or builder.has_ids):
            return chunks
        logprobs = b"null"
        if builder.has_logprobs:
            scored = builder.logprobs(update.token_ids, update.logprobs, update.finish)
            logprobs = orjson.dumps(scored if scored and scored["content"] else None)
        delta = b"{}"
        if update.text or builder.has_logprobs:
            delta = b'{"content":' + orjson.dumps(update.text) + b"}"
        reason = update.finish.type if update.finish else None
        return chunks + builder.chunk(update.index, delta, logprobs, reason, update.token_ids)

    def end(self, generation: Generation) -> bytes:
        return self._builder.end(generation)

    def prepare(self, state: ReqState) -> Steps[None]:
        """Do nothing: events do not depend on the prompt."""
        return no_steps(state)

    def full_response(self, generation: Generation, choices: list[FinishedChoice]) -> Steps[bytes]:
        """Return a `chat.completion` object."""
        rows = []
        for choice in choices:
            scored = yield from self._builder.logprob_steps(choice.token_ids, choice.logprobs, choice.finish)
            rows.append(
                {
                    "index": choice.index,
                    "message": {"role": "assistant", "content": choice.text, "refusal": None},
                    "logprobs": scored,
                    "finish_reason": choice.finish.type if choice.finish else None,
                    **self._builder.ids(choice.token_ids),
                }
            )
            yield
        return (yield from self._builder.full_response(generation, rows))
