"""Writer of /generate responses, in SGLang's format."""

import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import orjson

from tercet.frontend.api.generation_response import FinishedChoice
from tercet.frontend.api.openai.logprobs import Members, entries, sliced
from tercet.frontend.api.sglang.client_ids import ClientId
from tercet.frontend.http.loop_turns import Steps, result_of
from tercet.frontend.http.sse import DONE, event
from tercet.frontend.manager.req_state import Generation, GenerationUpdate, ReqState
from tercet.frontend.model.token_bytes import TokenBytes
from tercet.protocol.messages.values import FinishReason, FinishType, Logprobs, unpack_ints


class GenerateWriter:
    """Writer of /generate responses. Several prompts or choices are answered with a list.

    An event of a stream has the whole text so far. Choices are numbered by prompt, then by index.
    """

    def __init__(
        self,
        *,
        batch: bool = False,
        client_id: ClientId | None = None,
        shows_prompt_ids: bool = False,
        version: Callable[[str], str] = str,
    ) -> None:
        """Create it. `version` returns the version of weights with a fingerprint, by default the fingerprint."""
        self._version = version
        self._batch = batch
        self._client_id = client_id
        """The id that the client chose for its only prompt."""
        self._shows_prompt_ids = shows_prompt_ids
        self._first_numbers: list[int] = []
        """Number of the first choice of each prompt."""
        self._texts: dict[int, str] = {}
        self._ids: dict[int, list[int]] = {}
        self._scores: dict[int, _Scores] = {}
        self._prompts: dict[str, _Scores] = {}
        self._prompt_ids: dict[str, orjson.Fragment] = {}
        """Serialized token ids of each prompt, because every event of a stream repeats them."""

    def events(self, generation: Generation, arrivals: list[GenerationUpdate]) -> bytes:
        """Return an event for each choice with new tokens."""
        chunks = b""
        for arrival in arrivals:
            update, state = arrival.update, generation.states[arrival.prompt]
            result_of(self.prepare(state))
            number = self._number(generation, arrival.prompt, update.index)
            text = self._texts[number] = self._texts.get(number, "") + update.text
            ids = self._ids.setdefault(number, [])
            ids += update.token_ids
            if number not in self._scores:
                self._scores[number] = _new_scores(state)
            scores = self._scores[number]
            if state.request.options.logprobs is not None:
                scores.add(update.token_ids, update.logprobs)
            answer = self._choice(generation, arrival.prompt, update.index, text, ids, scores, update.finish)
            chunks += event(orjson.dumps(answer))
        return chunks

    def end(self, generation: Generation) -> bytes:  # noqa: ARG002
        return DONE

    def prepare(self, state: ReqState) -> Steps[None]:
        """Write the log-probabilities of the prompt, from the requested token on."""
        if state.prompt_logprobs is not None and state.rid not in self._prompts:
            scores, start = _new_scores(state), state.request.options.logprob_start
            yield from scores.steps(unpack_ints(state.prompt_ids), [state.prompt_logprobs], start)
            self._prompts[state.rid] = scores

    def full_response(self, generation: Generation, choices: list[FinishedChoice]) -> Steps[bytes]:
        """Return one object, or a list of them."""
        rows = []
        for each in choices:
            yield from self.prepare(each.state)
            ids, scores = list(each.token_ids), _new_scores(each.state)
            if each.state.request.options.logprobs is not None:
                yield from scores.steps(ids, each.logprobs)
            rows.append(self._choice(generation, each.prompt, each.index, each.text, ids, scores, each.finish))
            yield
        return orjson.dumps(rows if self._batch or len(rows) > 1 else rows[0])

    def _number(self, generation: Generation, prompt: int, index: int) -> int:
        if not self._first_numbers:
            self._first_numbers = list(accumulate((state.sampling.n for state in generation.states), initial=0))
        return self._first_numbers[prompt] + index

    def _choice(
        self,
        generation: Generation,
        prompt: int,
        index: int,
        text: str,
        ids: list[int],
        scores: "_Scores",
        finish: FinishReason | None,
    ) -> dict[str, Any]:
        number, state = self._number(generation, prompt, index), generation.states[prompt]
        choice = state.choices[index]
        if state.request.options.max_tokens == 0:
            text, ids, scores = "", [], _Scores()
        meta: dict[str, Any] = {
            "id": state.rid if self._client_id is None else self._client_id.chosen,
            "finish_reason": finish and _finish(finish, len(ids)),
            "prompt_tokens": state.prompt_tokens,
            "completion_tokens": len(ids),
            "cached_tokens": state.cached_tokens,
            "weight_version": self._version(choice.weights or state.model.identity.weights),
        }
        if finish is not None:  # a request that is aborted early has no token
            meta["e2e_latency"] = (choice.last_token_at or time.monotonic()) - generation.slot.admitted_at
        if state.request.options.logprobs is not None:
            meta |= self._prompt_scores(state).fields("input") | scores.fields("output")
        answer = {"index": number, "text": text, "output_ids": ids, "meta_info": meta}
        return {**answer, "prompt_token_ids": self._ids_of_prompt(state)} if self._shows_prompt_ids else answer

    def _ids_of_prompt(self, state: ReqState) -> orjson.Fragment:
        if state.rid not in self._prompt_ids:
            self._prompt_ids[state.rid] = orjson.Fragment(orjson.dumps(list(unpack_ints(state.prompt_ids))))
        return self._prompt_ids[state.rid]

    def _prompt_scores(self, state: ReqState) -> "_Scores":
        """Return the scores of the prompt, if its log-probabilities have arrived. Its first token has none."""
        return self._prompts.get(state.rid) or _Scores()


class _Scores:
    """Serialized log-probabilities: `[logprob, token id, text]` of each token, and of its alternatives.

    Without `names` the text is null. The triples are kept as JSON, because every event of a stream repeats all of them.
    """

    def __init__(self, names: TokenBytes | None = None) -> None:
        self._names = names
        self._chosen = Members()
        self._others = Members()

    def steps(self, ids: Sequence[int], logprobs: list[Logprobs], start: int = 0) -> Steps[None]:
        """Add further tokens in steps, without the first `start` of them."""
        place = 0
        for some, part in sliced(ids, logprobs):
            self.add(some, [part], max(start - place, 0))
            place += len(some)
            yield

    def add(self, ids: Sequence[int], logprobs: list[Logprobs], start: int = 0) -> None:
        """Add further tokens at once, without the first `start` of them."""
        scored = list(zip(ids, entries(logprobs), strict=True))[start:]
        self._chosen.add([[chosen, each, self._text(each)] for each, (chosen, _) in scored])
        self._others.add(
            [
                None if chosen is None else [[value, other, self._text(other)] for other, value in alternatives]
                for _, (chosen, alternatives) in scored
            ]
        )

    def _text(self, token_id: int) -> str | None:
        return None if self._names is None else self._names[token_id].decode(errors="replace")

    def fields(self, side: str) -> dict[str, orjson.Fragment]:
        """Return the fields for the tokens of the `input` or the `output`."""
        return {
            f"{side}_token_logprobs": self._chosen.fragment(),
            f"{side}_top_logprobs": self._others.fragment(),
        }


def _new_scores(state: ReqState) -> _Scores:
    return _Scores(state.model.files.token_bytes if state.request.options.logprob_texts else None)


def _finish(finish: FinishReason, tokens: int) -> dict[str, Any]:
    """Return SGLang's object for the end of a choice with this number of tokens."""
    match finish.type:
        case FinishType.LENGTH:
            return {"type": "length", "matched": None, "length": tokens}
        case FinishType.ABORT:
            return {"type": "abort", "message": finish.message, "status_code": None, "err_type": None}
    return {"type": finish.type, "matched": finish.matched}
