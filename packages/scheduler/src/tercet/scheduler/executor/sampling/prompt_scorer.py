"""Log-probabilities of the prompt tokens that a step computes."""

from collections.abc import Callable, Iterable
from functools import partial

import torch

from tercet.scheduler.core.plan import Row, SlotInit
from tercet.scheduler.device.oom import OomPolicy
from tercet.scheduler.executor.sampling.sampler import SamplingOps
from tercet.scheduler.executor.sampling.slot_transcripts import Tokens
from tercet.scheduler.executor.step_output import PromptLogprobs

_CHUNK = 256
"""Prompt positions whose logits are held at once."""


class PromptScorer:
    """Scorer of the rows whose request asks for log-probabilities of its prompt."""

    def __init__(
        self,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        known: Tokens,
        ops: SamplingOps,
        policy: OomPolicy,
    ) -> None:
        """Create it. `policy` is for positions whose logits may not fit in memory."""
        self._compute_logits = compute_logits
        self._known = known
        self._ops = ops
        self._policy = policy

    def score(self, hidden: torch.Tensor, rows: Iterable[tuple[Row, SlotInit]]) -> list[PromptLogprobs]:
        """Return those of the tokens at (start, start + count] of each row that asks for them, in chunks.

        `hidden` [tokens, hidden] are the states of all rows.
        """
        results = []
        first = 0
        for index, (row, init) in enumerate(rows):
            last = min(row.start + row.count, init.prompt_tokens - 1)
            if init.prompt_logprobs and last > row.start:
                states = hidden[first : first + last - row.start]
                targets = self._known(row.slot, row.start + 1, last + 1)
                results.append(self._score(index, states, targets, max(init.top_logprobs, 0)))
            first += row.count
        return results

    def _score(self, index: int, states: torch.Tensor, targets: torch.Tensor, top: int) -> PromptLogprobs:
        run = partial(self._part, states, targets, top)
        parts = []
        for first in range(0, len(targets), _CHUNK):
            parts += self._policy(run, slice(first, min(first + _CHUNK, len(targets))))
        chosen, top_ids, top_logprobs = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return PromptLogprobs(index, chosen, top_ids, top_logprobs)

    def _part(
        self, states: torch.Tensor, targets: torch.Tensor, top: int, rows: slice
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = self._compute_logits(states[rows])
        return self._ops.token_logprobs(logits, targets[rows], top)
