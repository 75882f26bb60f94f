"""`Sampler`: from logits to tokens, every row by its slot's own parameters, all rows at once.

Order: penalties, logit bias, suppressed ids, the masks of grammars; then temperature, top-k, top-p, min-p
and the draw (`tercet.kernels.ops.sampling`).
Reported log-probabilities are of the model's raw logits, also where a grammar allows one token alone.

The device is sent what the rows of a step need, each kind of row in one piece, and nothing for rows of no kind.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from tercet.kernels.ops import sampler_ops
from tercet.kernels.ops.penalties import Penalties, TokenCounts, add_bias
from tercet.kernels.ops.philox import NoiseKey
from tercet.kernels.ops.sampling import Filters
from tercet.protocol.values import unpack_ints
from tercet.scheduler.core.plan import SlotInit
from tercet.scheduler.executor.penalty_counts import PenaltyCounts
from tercet.scheduler.executor.slot_params import Arrangement, Draw, SlotParams
from tercet.scheduler.executor.uploads import Array, Uploads

Masks = Callable[[], torch.Tensor]
"""Waits for the bitmasks of all rows of a step: int32 [rows, ceil(vocab / 32)], on the host."""

_INFINITY = float("inf")


class SamplingOps(Protocol):
    """What `tercet.kernels.ops.sampler_ops` does, perhaps faster."""

    def largest(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(the largest logit of each row, its token)."""
        ...

    def sample(
        self, logits: torch.Tensor, temperature: torch.Tensor, filters: Filters | None, noise: NoiseKey
    ) -> torch.Tensor:
        """A token for each row; -1 where the largest logit is not finite."""
        ...

    def apply_bitmask_(self, logits: torch.Tensor, bitmask: torch.Tensor) -> torch.Tensor:
        """Forbid tokens, in place."""
        ...

    def apply_penalties_(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        counts: TokenCounts,
        sequences: torch.Tensor,
        penalties: Penalties,
    ) -> None:
        """Penalise rows, in place, for what their sequences have said."""
        ...

    def token_logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, top: int, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probabilities of tokens, and the `top` likeliest ids with theirs; of all rows, or of some."""
        ...


@dataclass(frozen=True, eq=False)
class TokenLogprobs:
    """Log-probabilities of some rows, as tensors: entry i is of row `rows[i]`, which wants `tops[i]` of top."""

    rows: Sequence[int]
    tops: Sequence[int]
    chosen: torch.Tensor  # float32 [n]
    top_ids: torch.Tensor  # int64 [n, max(tops)]
    top_logprobs: torch.Tensor  # float32 [n, max(tops)]


@dataclass(frozen=True, eq=False)
class Sampled:
    """int64 [rows], -1 where logits were not finite; and log-probabilities where any row wants them."""

    tokens: torch.Tensor
    logprobs: TokenLogprobs | None


class Sampler:
    """Holds each slot's parameters, and for slots with penalties the counts of their tokens, on the device."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device, ops: SamplingOps = sampler_ops) -> None:
        self._ops = ops
        self._uploads = Uploads(device)
        self._params = SlotParams(slots)
        self._counts = PenaltyCounts(vocab_size, device)

    def introduce(self, inits: Sequence[SlotInit]) -> None:
        """Take the parameters of choices that take slots; counts are made anew from their known tokens."""
        for init in inits:
            self._params.introduce(init)
            self._counts.drop(init.slot)
            if self._params.penalises(init.slot):
                self._counts.introduce(init.slot, unpack_ints(init.tokens), init.prompt_tokens)

    def sample(
        self,
        logits: torch.Tensor,
        slots: Sequence[int] | Array,
        positions: Sequence[int] | Array,
        masks: Masks | None = None,
    ) -> Sampled:
        """Sample one token for each row. `logits` [rows, vocab], of any floating dtype, are overwritten.

        `positions` are the output positions of the tokens to be sampled: 0 is the first after the prompt. A row whose
        mask allows nothing gets -1. Nothing but a penalty or a bias costs a float32 copy of the logits.
        """
        slots = np.asarray(slots)
        step = self._params.arrange(slots, np.asarray(positions))
        changes = step.changes or masks is not None
        reporting, raw = None, None
        if len(step.reporting):
            (reporting,) = self._uploads.send([step.reporting])
            raw = logits[reporting] if changes else None
        if not changes:
            tokens = self._choose(logits, step.draws)
        else:
            finite = self._likeliest(logits) >= 0  # a mask may hide what is not
            logits, said = self._change(logits, slots, step, masks)
            tokens = torch.where(finite, self._choose(logits, step.draws), -1)
            if said is not None:
                rows, sequences = said
                self._counts.add(sequences, tokens[rows])
        if reporting is None:
            return Sampled(tokens, None)
        said_tokens, top = tokens[reporting].clamp(min=0), max(step.tops)
        given = (logits, said_tokens, top, reporting) if raw is None else (raw, said_tokens, top)
        return Sampled(tokens, TokenLogprobs(step.reporting.tolist(), step.tops, *self._ops.token_logprobs(*given)))

    def count(self, slot: int, tokens: Sequence[int]) -> None:
        """Tokens that a slot was given without sampling; those sampled are counted already."""
        if self._params.penalises(slot):
            rows = self._counts.rows([slot]) * len(tokens)
            self._counts.add(*self._uploads.send([_integers(rows), _integers(tokens)]))

    def _change(
        self, logits: torch.Tensor, slots: Array, step: Arrangement, masks: Masks | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        """(the logits that are sampled from, and of penalised rows their numbers and where they are counted)."""
        said = None
        if step.changes:
            logits = logits.float()  # bfloat16 would lose what is small beside a logit
        if len(step.penalised):
            sequences = _integers(self._counts.rows(slots[step.penalised].tolist()))
            rows, counted, strengths = self._uploads.send([step.penalised, sequences, step.strengths])
            repetition, frequency, presence = strengths.unbind()
            penalties = Penalties(repetition=repetition, frequency=frequency, presence=presence)
            self._ops.apply_penalties_(logits, rows, self._counts.table, counted, penalties)
            said = rows, counted
        if len(step.biases):
            biased, biases = self._uploads.send([step.biased, step.biases])
            add_bias(logits, biased[0], biased[1], biases)
        if masks is not None:
            self._ops.apply_bitmask_(logits, self._uploads.send([masks().numpy()])[0])
        return logits, said

    def _choose(self, logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        """A token for each row, drawn or the likeliest; -1 where the largest logit is not finite."""
        if len(draws) == 1 and len(draws[0].rows) == len(logits):
            return self._draw(logits, draws[0])
        tokens = self._likeliest(logits)
        for draw in draws:
            (rows,) = self._uploads.send([draw.rows])
            tokens[rows] = self._draw(logits[rows], draw)
        return tokens

    def _likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        most, tokens = self._ops.largest(logits)
        return torch.where(most.abs() < _INFINITY, tokens, -1)  # -inf alone is a token that is never said

    def _draw(self, logits: torch.Tensor, draw: Draw) -> torch.Tensor:
        keys, temperature, *filters = self._uploads.send(draw.arrays)
        return self._ops.sample(logits, temperature, Filters(*filters) if filters else None, NoiseKey(*keys.unbind()))


def _integers(numbers: Any) -> Array:
    return np.array(numbers, dtype=np.int64)
