"""How /generate is answered: in SGLang's shape."""

from collections.abc import Sequence
from typing import Any

import orjson

from tercet.frontend.answer import Whole
from tercet.frontend.event_stream import DONE, event
from tercet.frontend.generation import Arrival, Generation
from tercet.frontend.openai.logprobs import entries
from tercet.frontend.req_state import ReqState
from tercet.protocol.values import FinishReason, Logprobs, unpack_ints


class NativeForm:
    """Each event of a stream holds the whole text so far; a list of prompts, and n > 1, answer with a list.

    The choice of prompt i with index j is number i * n + j. Log-probabilities of a prompt are those from `start` on.
    """

    def __init__(self, start: int | None = None, *, batch: bool = False) -> None:
        self._start = start or 0
        self._batch = batch
        self._texts: dict[int, str] = {}
        self._scores: dict[int, list[Logprobs]] = {}
        self._prompts: dict[str, dict[str, Any]] = {}

    def events(self, generation: Generation, arrivals: list[Arrival]) -> bytes:
        """One event for each choice with news."""
        chunks = b""
        for arrival in arrivals:
            update, state = arrival.update, generation.states[arrival.prompt]
            number = arrival.prompt * state.sampling.n + update.index
            text = self._texts[number] = self._texts.get(number, "") + update.text
            scores = self._scores.setdefault(number, [])
            scores += update.logprobs
            ids = state.choices[update.index].token_ids
            chunks += event(orjson.dumps(self._choice(number, state, text, ids, scores, update.finish)))
        return chunks

    def end(self, generation: Generation) -> bytes:  # noqa: ARG002
        """The end of the stream."""
        return DONE

    def whole(self, generation: Generation, choices: list[Whole]) -> bytes:  # noqa: ARG002
        """One object, or a list of them."""
        rows = [
            self._choice(_number(each), each.state, each.text, each.token_ids, each.logprobs, each.finish)
            for each in choices
        ]
        return orjson.dumps(rows if self._batch or len(rows) > 1 else rows[0])

    def _choice(
        self,
        number: int,
        state: ReqState,
        text: str,
        token_ids: Sequence[int],
        logprobs: list[Logprobs],
        finish: FinishReason | None,
    ) -> dict[str, Any]:
        ids = list(token_ids)
        if state.request.max_tokens == 0:
            text, ids, logprobs = "", [], []
        meta: dict[str, Any] = {
            "id": state.rid,
            "finish_reason": finish and {"type": finish.type, "matched": finish.matched},
            "prompt_tokens": state.prompt_tokens,
            "completion_tokens": len(ids),
            "cached_tokens": state.cached_tokens,
        }
        if state.request.logprobs is not None:
            meta |= self._prompt_scores(state) | _scores("output", ids, logprobs)
        return {"index": number, "text": text, "output_ids": ids, "meta_info": meta}

    def _prompt_scores(self, state: ReqState) -> dict[str, Any]:
        """Those of the prompt's tokens from the one that was asked for on; of the first there is none."""
        if state.prompt_logprobs is None:
            return _scores("input", [], [])
        if state.rid not in self._prompts:
            scores = _scores("input", list(unpack_ints(state.prompt_ids)), [state.prompt_logprobs])
            self._prompts[state.rid] = {name: values[self._start :] for name, values in scores.items()}
        return self._prompts[state.rid]


def _number(choice: Whole) -> int:
    return choice.prompt * choice.state.sampling.n + choice.index


def _scores(side: str, ids: list[int], logprobs: list[Logprobs]) -> dict[str, list[Any]]:
    """Triples of log-probability, token id and text, which is left out; and the same of each token's alternatives."""
    scored = list(zip(ids, entries(logprobs), strict=True))
    return {
        f"{side}_token_logprobs": [[chosen, each, None] for each, (chosen, _) in scored],
        f"{side}_top_logprobs": [
            None if chosen is None else [[value, other, None] for other, value in alternatives]
            for _, (chosen, alternatives) in scored
        ],
    }
