"""Writer of chat responses that are plain text, and the chunk builder that it shares with `ParsedChatWriter`."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from tercet.frontend.api.generation_response import FinishedChoice
from tercet.frontend.api.openai.chat_schema import ChatRequest
from tercet.frontend.api.openai.logprobs import chat_logprob_steps, chat_logprobs, prompt_logprob_steps
from tercet.frontend.api.openai.stop_reason import stop_fields
from tercet.frontend.api.openai.usage import chunk_suffix, usage
from tercet.frontend.http.loop_turns import Steps, no_steps
from tercet.frontend.http.sse import DONE, event
from tercet.frontend.manager.req_state import Generation, GenerationUpdate, ReqState, Update
from tercet.frontend.model.served_model import ServedModel
from tercet.protocol.messages.values import FinishReason, Logprobs, unpack_ints


class ChatChunks:
    """Chunk builder of one HTTP request. A chunk is a prefix, serialized once, followed by the new part."""

    def __init__(self, rid: str, body: ChatRequest, model: ServedModel) -> None:
        self.has_logprobs = bool(body.logprobs)
        self.has_ids = bool(body.return_token_ids)
        self._top = body.top_logprobs or 0
        self._prompt_top = body.prompt_logprobs
        self._names = model.files.token_bytes
        self._stop_token_ids = body.stop_token_ids
        self._include_usage = body.include_usage
        self._continuous_usage = body.continuous_usage
        self._tokens_sent = 0
        self._head = {
            "id": f"chatcmpl-{rid}",
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": model.fingerprint,
        }
        self._prefix = self._prefixed({})
        self._set_counts(None)

    @property
    def head(self) -> Mapping[str, Any]:
        """Return the fields that all chunks of the completion share."""
        return self._head

    def _prefixed(self, more: dict[str, Any]) -> bytes:
        """Return the start of a chunk, up to its choices."""
        head = orjson.dumps({**self._head, "object": "chat.completion.chunk", **more})
        return b"data: " + head[:-1] + b',"choices":['

    def count(self, generation: Generation, tokens: int, reasoning_tokens: int = 0) -> None:
        """Count output tokens of the chunks from here on, which show the counts so far on request."""
        if self._continuous_usage:
            self._tokens_sent += tokens
            counts = usage(generation, self._tokens_sent, reasoning_tokens=reasoning_tokens, ended=False)
            self._set_counts(counts)

    def _set_counts(self, counts: dict[str, Any] | None) -> None:
        self._suffix = chunk_suffix(counts, include_usage=self._include_usage)
        self._text_suffix = b'},"logprobs":null,"finish_reason":null}' + self._suffix

    def first_chunk(self, generation: Generation, index: int, delta: bytes) -> bytes:
        """Return the first chunk of a choice, with the prompt's token ids on request."""
        chunk = self.chunk(index, delta)
        if not self.has_ids:
            return chunk
        return self._prefixed({"prompt_token_ids": _prompt_ids(generation)}) + chunk.removeprefix(self._prefix)

    def chunk(
        self,
        index: int,
        delta: bytes,
        logprobs: bytes = b"null",
        reason: str | None = None,
        token_ids: Sequence[int] | None = None,
        finish: FinishReason | None = None,
    ) -> bytes:
        """Return an event for one choice. `delta` and `logprobs` are JSON; token ids are added on request.

        `reason` is the API's name for `finish`.
        """
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b%b}%b' % (
            self._prefix,
            index,
            delta,
            logprobs,
            b"null" if reason is None else b'"' + reason.encode() + b'"',
            b"" if finish is None else b"," + orjson.dumps(self.stop_fields(finish))[1:-1],
            b"" if not self.has_ids or token_ids is None else b',"token_ids":' + orjson.dumps(list(token_ids)),
            self._suffix,
        )

    def text_chunk(self, index: int, text: bytes) -> bytes:
        """Return the event for plain text, the most common one. `text` is JSON."""
        return b'%b{"index":%d,"delta":{"content":%b%b' % (self._prefix, index, text, self._text_suffix)

    def stop_fields(self, finish: FinishReason | None) -> dict[str, Any]:
        """Return the fields that say what ended a choice."""
        return stop_fields(finish, self._stop_token_ids)

    def logprobs(self, token_ids: Sequence[int], parts: Sequence[Logprobs]) -> dict[str, Any] | None:
        """Return the log-probabilities of all tokens on request.

        Those of reasoning, tool calls and the end token are included, as in the number of output tokens.
        """
        return chat_logprobs(self._names, token_ids, parts, self._top) if self.has_logprobs else None

    def logprob_steps(self, token_ids: Sequence[int], parts: Sequence[Logprobs]) -> Steps[dict[str, Any] | None]:
        """Return `logprobs` of a whole choice, written in steps."""
        if not self.has_logprobs:
            return None
        return (yield from chat_logprob_steps(self._names, token_ids, parts, self._top))

    def ids(self, token_ids: Sequence[int]) -> dict[str, list[int]]:
        """Return the token ids of a whole choice on request, including a token that only ends the output."""
        return {"token_ids": list(token_ids)} if self.has_ids else {}

    def end(self, generation: Generation, reasoning_tokens: int = 0) -> bytes:
        """Return the end of the stream, with a chunk of token counts on request."""
        if not self._include_usage:
            return DONE
        counts = usage(generation, reasoning_tokens=reasoning_tokens)
        return (
            event(orjson.dumps({**self._head, "object": "chat.completion.chunk", "choices": [], "usage": counts}))
            + DONE
        )

    def full_response(
        self, generation: Generation, choices: list[dict[str, Any]], reasoning_tokens: int = 0
    ) -> Steps[bytes]:
        """Return a `chat.completion` object."""
        counts = usage(generation, reasoning_tokens=reasoning_tokens)
        answer = {**self._head, "object": "chat.completion", "choices": choices, "usage": counts}
        if self.has_ids:
            answer["prompt_token_ids"] = _prompt_ids(generation)
        if self._prompt_top is not None:
            [state] = generation.states
            ids = unpack_ints(state.prompt_ids)
            answer["prompt_logprobs"] = yield from prompt_logprob_steps(
                self._names, ids, state.prompt_logprobs, self._prompt_top
            )
        yield
        return orjson.dumps(answer)


def _prompt_ids(generation: Generation) -> list[int]:
    [state] = generation.states
    return list(unpack_ints(state.prompt_ids))


class ChatWriter:
    """Writer of chat answers without parsing, for speed: most chunks are built without intermediate objects."""

    def __init__(self, rid: str, body: ChatRequest, model: ServedModel) -> None:
        self._builder = ChatChunks(rid, body, model)
        self._started: set[int] = set()

    @property
    def head(self) -> Mapping[str, Any]:
        return self._builder.head

    def usage(self, generation: Generation) -> dict[str, Any]:
        return usage(generation)

    def events(self, generation: Generation, arrivals: list[GenerationUpdate]) -> bytes:
        """Return a chunk for each choice with new tokens. The first one of a choice carries the role."""
        return b"".join([self._events_of(generation, arrival.update) for arrival in arrivals])

    def _events_of(self, generation: Generation, update: Update) -> bytes:
        builder, chunks = self._builder, b""
        if update.index in self._started:
            builder.count(generation, len(update.token_ids))
            if update.text and update.finish is None and not (builder.has_logprobs or builder.has_ids):
                return builder.text_chunk(update.index, orjson.dumps(update.text))
        else:
            self._started.add(update.index)
            builder.count(generation, 0)
            role = b'{"role":"assistant","content":"","refusal":null}'
            chunks = builder.first_chunk(generation, update.index, role)
            builder.count(generation, len(update.token_ids))
        if not (update.text or update.finish or builder.has_logprobs or builder.has_ids):
            return chunks
        logprobs = b"null"
        if builder.has_logprobs:
            scored = builder.logprobs(update.token_ids, update.logprobs)
            logprobs = orjson.dumps(scored if scored and scored["content"] else None)
        delta = b"{}"
        if update.text or builder.has_logprobs:
            delta = b'{"content":' + orjson.dumps(update.text) + b"}"
        reason = update.finish.type if update.finish else None
        return chunks + builder.chunk(update.index, delta, logprobs, reason, update.token_ids, update.finish)

    def end(self, generation: Generation) -> bytes:
        return self._builder.end(generation)

    def prepare(self, state: ReqState) -> Steps[None]:
        """Do nothing: events do not depend on the prompt."""
        return no_steps(state)

    def full_response(self, generation: Generation, choices: list[FinishedChoice]) -> Steps[bytes]:
        """Return a `chat.completion` object."""
        rows = []
        for choice in choices:
            scored = yield from self._builder.logprob_steps(choice.token_ids, choice.logprobs)
            rows.append(
                {
                    "index": choice.index,
                    "message": {"role": "assistant", "content": choice.text, "refusal": None},
                    "logprobs": scored,
                    "finish_reason": choice.finish.type if choice.finish else None,
                    **self._builder.stop_fields(choice.finish),
                    **self._builder.ids(choice.token_ids),
                }
            )
            yield
        return (yield from self._builder.full_response(generation, rows))
