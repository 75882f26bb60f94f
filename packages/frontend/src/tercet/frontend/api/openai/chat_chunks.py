"""What every chunk and completion of one chat request has around the words: head, log-probabilities, counts."""

import time
from collections.abc import Sequence
from typing import Any

import orjson

from tercet.frontend.api.openai.chat_schema import ChatRequest
from tercet.frontend.api.openai.logprobs import chat_logprob_steps, chat_logprobs, prompt_logprob_steps, without_end
from tercet.frontend.api.openai.usage import chunk_suffix, usage
from tercet.frontend.http.loop_turns import Steps
from tercet.frontend.http.sse import DONE, event
from tercet.frontend.manager.generation import Generation
from tercet.frontend.model.served_model import ServedModel
from tercet.protocol.messages.values import FinishReason, Logprobs, unpack_ints


class ChatChunks:
    """Made once for each HTTP request. A chunk is a prefix, made here, and what is new."""

    def __init__(self, rid: str, body: ChatRequest, model: ServedModel) -> None:
        self.has_logprobs = bool(body.logprobs)
        self.has_ids = bool(body.return_token_ids)
        self._top = body.top_logprobs or 0
        self._prompt_top = body.prompt_logprobs
        self._names = model.files.token_bytes
        self._shows_end = bool(body.include_stop_str_in_output)
        self._include_usage = body.include_usage
        self.continuous_usage = body.continuous_usage
        self._head = {
            "id": f"chatcmpl-{rid}",
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": model.fingerprint,
        }
        self._prefix = self._prefixed({})
        self._end_with(None)

    def _prefixed(self, more: dict[str, Any]) -> bytes:
        """What begins a chunk, up to its choices."""
        head = orjson.dumps({**self._head, "object": "chat.completion.chunk", **more})
        return b"data: " + head[:-1] + b',"choices":['

    def count(self, generation: Generation, reasoning_tokens: int = 0) -> None:
        """Chunks from here on have the counts of what has come."""
        self._end_with(usage(generation, reasoning_tokens=reasoning_tokens, ended=False))

    def _end_with(self, counts: dict[str, Any] | None) -> None:
        self._suffix = chunk_suffix(counts, wanted=self._include_usage)
        self._text_suffix = b'},"logprobs":null,"finish_reason":null}' + self._suffix

    def first_chunk(self, generation: Generation, index: int, delta: bytes) -> bytes:
        """A choice's first, with the ids of the prompt when asked for."""
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
    ) -> bytes:
        """An event with one choice's delta, which is JSON, as `logprobs` are; with ids where they are asked for."""
        finish = b"null" if reason is None else b'"' + reason.encode() + b'"'
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b}%b' % (
            self._prefix,
            index,
            delta,
            logprobs,
            finish,
            b"" if not self.has_ids or token_ids is None else b',"token_ids":' + orjson.dumps(list(token_ids)),
            self._suffix,
        )

    def text_chunk(self, index: int, text: bytes) -> bytes:
        """The event that nearly all are: text, which is JSON, and nothing else."""
        return b'%b{"index":%d,"delta":{"content":%b%b' % (self._prefix, index, text, self._text_suffix)

    def logprobs(
        self, token_ids: Sequence[int], parts: Sequence[Logprobs], finish: FinishReason | None
    ) -> dict[str, Any] | None:
        """Log-probabilities of tokens, when asked for; of all tokens, whatever their text means."""
        if not self.has_logprobs:
            return None
        shown = token_ids if self._shows_end else without_end(token_ids, finish)
        return chat_logprobs(self._names, shown, parts, self._top)

    def logprob_steps(
        self, token_ids: Sequence[int], parts: Sequence[Logprobs], finish: FinishReason | None
    ) -> Steps[dict[str, Any] | None]:
        """Do what `logprobs` does, in steps, for a whole choice."""
        if not self.has_logprobs:
            return None
        shown = token_ids if self._shows_end else without_end(token_ids, finish)
        return (yield from chat_logprob_steps(self._names, shown, parts, self._top))

    def ids(self, token_ids: Sequence[int]) -> dict[str, list[int]]:
        """What a whole choice tells of its tokens, when asked for: of all, also of one that only ends the answer."""
        return {"token_ids": list(token_ids)} if self.has_ids else {}

    def end(self, generation: Generation, reasoning_tokens: int = 0) -> bytes:
        """The chunk of token counts, when asked for, and the end of the stream."""
        if not self._include_usage:
            return DONE
        counts = usage(generation, reasoning_tokens=reasoning_tokens)
        return (
            event(orjson.dumps({**self._head, "object": "chat.completion.chunk", "choices": [], "usage": counts}))
            + DONE
        )

    def whole(self, generation: Generation, choices: list[dict[str, Any]], reasoning_tokens: int = 0) -> Steps[bytes]:
        """A chat.completion."""
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
