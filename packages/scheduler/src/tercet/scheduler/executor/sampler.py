"""`Sampler`: from logits to tokens, every row by its slot's own parameters, all rows at once.

Order: penalties, logit bias, suppressed ids, the masks of grammars; then temperature, top-k, top-p, min-p
and the draw (`tercet.kernels.ops.sampling`).
Reported log-probabilities are of the model's raw logits, also where a grammar allows one token alone.

What the host decides of a step is sent to the device in one piece: which rows are drawn, penalised, biased, reported.
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
from tercet.scheduler.executor.uploads import Array, Uploads

Masks = Callable[[], torch.Tensor]
"""Waits for the bitmasks of all rows of a step: int32 [rows, ceil(vocab / 32)], on the host."""

_NEVER = float("-inf")
_LAST = -1e30
"""Added to suppressed ids where a grammar might allow nothing else: the grammar is stronger."""
_WORD = 0xFFFFFFFF


class SamplingOps(Protocol):
    """What `tercet.kernels.ops.sampler_ops` does, perhaps faster."""

    def largest(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(the largest logit of each row, its token)."""
        ...

    def sample(
        self, logits: torch.Tensor, temperature: torch.Tensor, filters: Filters | None, noise: NoiseKey
    ) -> torch.Tensor:
        """A token for each row."""
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


@dataclass(frozen=True, eq=False)
class _Wants:
    """What the host must know of a slot to put its row into the right batch."""

    draws: bool
    filters: bool
    penalises: bool
    bias: tuple[list[int], list[float]]
    suppressed_ids: list[int]
    suppression: float
    min_new_tokens: int
    top_logprobs: int

    @classmethod
    def of(cls, init: SlotInit) -> "_Wants":
        params = init.sampling
        return cls(
            draws=params.temperature > 0 and params.top_k != 1,
            filters=params.top_k > 0 or params.top_p < 1 or params.min_p > 0,
            penalises=params.repetition_penalty != 1 or bool(params.presence_penalty or params.frequency_penalty),
            bias=([*params.logit_bias.keys()], [*params.logit_bias.values()]),
            suppressed_ids=init.suppressed_ids,
            suppression=_NEVER if params.grammar is None else _LAST,
            min_new_tokens=params.min_new_tokens,
            top_logprobs=init.top_logprobs,
        )


@dataclass(frozen=True)
class _Arrangement:
    """What the host knows of a step before it runs: numbers of rows, and what each of them is given."""

    plain: list[int]  # drawn from everything
    filtered: list[int]
    penalised: list[int]
    sequences: list[int]  # of the penalised rows, in the table of counts
    reporting: list[int]
    tops: list[int]  # of the reporting rows
    biased: list[int]  # a row as often as it has biases
    bias_tokens: list[int]
    biases: list[float]

    def changes(self, masked: bool) -> bool:
        """Whether a row that is reported is changed before it is sampled."""
        return masked or not {*self.penalised, *self.biased}.isdisjoint(self.reporting)


class Sampler:
    """Holds each slot's parameters on the device, and for slots with penalties the counts of their tokens."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device, ops: SamplingOps = sampler_ops) -> None:
        self._ops = ops
        self._uploads = Uploads(device)
        self._wants: list[_Wants | None] = [None] * slots
        self._reals = torch.zeros(slots, 6, device=device)  # temperature, top_p, min_p, repetition, frequency, presence
        self._integers = torch.zeros(slots, 4, dtype=torch.int64, device=device)  # top_k, seed low, high, choice
        self._counts = PenaltyCounts(vocab_size, device)

    def introduce(self, inits: Sequence[SlotInit]) -> None:
        """Take the parameters of choices that take slots; counts are made anew from their known tokens."""
        if not inits:
            return
        reals, integers = [], []
        for init in inits:
            params = init.sampling
            wants = self._wants[init.slot] = _Wants.of(init)
            penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
            reals.append((params.temperature, params.top_p, params.min_p, *penalties))
            integers.append((params.top_k, params.seed & _WORD, params.seed >> 32 & _WORD, init.choice))
            self._counts.drop(init.slot)
            if wants.penalises:
                self._counts.introduce(init.slot, unpack_ints(init.tokens), init.prompt_tokens)
        given = _integers([init.slot for init in inits]), np.array(reals, dtype=np.float32), _integers(integers)
        slots, sent_reals, sent_integers = self._uploads.send(given)
        self._reals[slots] = sent_reals
        self._integers[slots] = sent_integers

    def sample(
        self,
        logits: torch.Tensor,
        slots: Sequence[int],
        positions: Sequence[int],
        masks: Masks | None = None,
    ) -> Sampled:
        """Sample one token for each row. `logits` [rows, vocab], of any floating dtype, are overwritten.

        `positions` are the output positions of the tokens to be sampled: 0 is the first after the prompt. A row whose
        mask allows nothing gets -1. Nothing but a penalty or a bias costs a float32 copy of the logits.
        """
        step = self._arrange(slots, positions)
        numbers = slots, positions, step.plain, step.filtered, step.penalised, step.sequences, step.reporting
        arrays = [*map(_integers, numbers), _integers([step.biased, step.bias_tokens])]
        sent = self._uploads.send([*arrays, np.array(step.biases, dtype=np.float32)])
        slot, position, plain, filtered, penalised, sequences, reporting, biased, biases = sent
        most, tokens = self._ops.largest(logits)
        finite = most.isfinite()  # NaN and inf are largest; -inf alone is a token that is never said
        raw = logits[reporting] if step.reporting and step.changes(masks is not None) else None
        if step.penalised or step.biased:
            logits = logits.float()  # bfloat16 would lose what is small beside a logit
        if step.penalised:
            strengths = self._strengths(slot[penalised])
            self._ops.apply_penalties_(logits, penalised, self._counts.table, sequences, strengths)
        if step.biased:
            add_bias(logits, biased[0], biased[1], biases)
        if masks is not None:
            self._ops.apply_bitmask_(logits, self._uploads.send([masks().numpy()])[0])
        if step.penalised or step.biased or masks is not None:
            most, tokens = self._ops.largest(logits)
            finite &= most.isfinite()
        if step.plain:
            tokens[plain] = self._draw(logits, plain, slot, position, filters=False)
        if step.filtered:
            tokens[filtered] = self._draw(logits, filtered, slot, position, filters=True)
        tokens = torch.where(finite, tokens, -1)
        if step.penalised:
            self._counts.add(sequences, tokens[penalised])
        if not step.reporting:
            return Sampled(tokens, None)
        said, top = tokens[reporting].clamp(min=0), max(step.tops)
        scores = self._ops.token_logprobs(logits if raw is None else raw, said, top, reporting if raw is None else None)
        return Sampled(tokens, TokenLogprobs(step.reporting, step.tops, *scores))

    def count(self, slot: int, tokens: Sequence[int]) -> None:
        """Tokens that a slot was given without sampling; those sampled are counted already."""
        if self._of(slot).penalises:
            rows = self._counts.rows([slot]) * len(tokens)
            self._counts.add(*self._uploads.send([_integers(rows), _integers(tokens)]))

    def _arrange(self, slots: Sequence[int], positions: Sequence[int]) -> _Arrangement:
        wants = [self._of(slot) for slot in slots]
        penalised = [row for row, want in enumerate(wants) if want.penalises]
        reporting = [row for row, want in enumerate(wants) if want.top_logprobs >= 0]
        biased: list[int] = []
        tokens: list[int] = []
        values: list[float] = []
        for row, want in enumerate(wants):
            ids, bias = want.bias
            suppressed = want.suppressed_ids if positions[row] < want.min_new_tokens else []
            biased += [row] * (len(ids) + len(suppressed))
            tokens += ids + suppressed
            values += bias + [want.suppression] * len(suppressed)
        return _Arrangement(
            plain=[row for row, want in enumerate(wants) if want.draws and not want.filters],
            filtered=[row for row, want in enumerate(wants) if want.draws and want.filters],
            penalised=penalised,
            sequences=self._counts.rows([slots[row] for row in penalised]),
            reporting=reporting,
            tops=[wants[row].top_logprobs for row in reporting],
            biased=biased,
            bias_tokens=tokens,
            biases=values,
        )

    def _draw(
        self, logits: torch.Tensor, rows: torch.Tensor, slot: torch.Tensor, position: torch.Tensor, *, filters: bool
    ) -> torch.Tensor:
        if len(rows) < len(logits):
            logits, slot, position = logits[rows], slot[rows], position[rows]
        temperature, top_p, min_p = self._reals[slot, :3].unbind(1)
        top_k, seed_low, seed_high, choice = self._integers[slot].unbind(1)
        noise = NoiseKey(seed_low, seed_high, choice, position)
        return self._ops.sample(logits, temperature, Filters(top_k, top_p, min_p) if filters else None, noise)

    def _strengths(self, slots: torch.Tensor) -> Penalties:
        repetition, frequency, presence = self._reals[slots, 3:].unbind(1)
        return Penalties(repetition=repetition, frequency=frequency, presence=presence)

    def _of(self, slot: int) -> _Wants:
        wants = self._wants[slot]
        if wants is None:
            raise ValueError(f"slot {slot} was never introduced")
        return wants


def _integers(numbers: Any) -> Array:
    return np.array(numbers, dtype=np.int64)
