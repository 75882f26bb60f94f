"""`Sampler`: from logits to tokens, every row by its slot's own parameters, all rows at once.

Order: penalties, logit bias, suppressed ids, the masks of grammars; then temperature, top-k, top-p, min-p
and the draw (`tercet.kernels.ops.sampling`).
Reported log-probabilities are of the model's raw logits, also where a grammar allows one token alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tercet.kernels.ops import sampling
from tercet.kernels.ops.logprobs import token_logprobs
from tercet.kernels.ops.penalties import Penalties, add_bias, apply_penalties
from tercet.kernels.ops.philox import NoiseKey
from tercet.kernels.ops.sampling import Filters
from tercet.protocol.values import unpack_ints
from tercet.scheduler.core.plan import SlotInit
from tercet.scheduler.executor.penalty_counts import PenaltyCounts

Masks = Callable[[], torch.Tensor]
"""Waits for the bitmasks of all rows of a step: int32 [rows, ceil(vocab / 32)], on the host."""

_NEVER = float("-inf")
_LAST = -1e30
"""Added to suppressed ids where a grammar might allow nothing else: the grammar is stronger."""
_WORD = 0xFFFFFFFF
_BLOCK = 1 << 22
"""Logits sampled from at a time: bounds the memory of the temporaries."""


class SamplingOps(Protocol):
    """What `tercet.kernels.ops.sampling` does, perhaps faster."""

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


class Sampler:
    """Holds each slot's parameters on the device, and for slots with penalties the counts of their tokens."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device, ops: SamplingOps = sampling) -> None:
        self._device = device
        self._ops = ops
        self._vocab_size = vocab_size
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
        slots = self._tensor([init.slot for init in inits])
        self._reals[slots] = torch.tensor(reals, dtype=torch.float32).to(self._device)
        self._integers[slots] = self._tensor(integers)

    def sample(
        self,
        logits: torch.Tensor,
        slots: Sequence[int],
        positions: Sequence[int],
        masks: Masks | None = None,
    ) -> Sampled:
        """Sample one token for each row. `logits` float32 [rows, vocab] are overwritten.

        `positions` are the output positions of the tokens to be sampled: 0 is the first after the prompt. A row whose
        mask allows nothing gets -1.
        """
        wants = [self._of(slot) for slot in slots]
        most, tokens = self._ops.largest(logits)
        finite = most.isfinite()  # NaN and inf are largest; -inf alone is a token that is never said
        reporting = [row for row, want in enumerate(wants) if want.top_logprobs >= 0]
        raw = logits[reporting] if reporting else logits
        slot_index = self._tensor(slots)
        adjusted = self._adjust(logits, wants, slots, positions)
        if masks is not None:
            self._ops.apply_bitmask_(logits, masks().to(self._device))
        if adjusted or masks is not None:
            most, tokens = self._ops.largest(logits)
            finite &= most.isfinite()
        for filtered in (False, True):
            rows = [row for row, want in enumerate(wants) if want.draws and want.filters == filtered]
            for block in _blocks(rows, max(1, _BLOCK // self._vocab_size)):
                chosen = [positions[row] for row in block]
                tokens[block] = self._draw(logits[block], slot_index[block], chosen, filtered)
        tokens = torch.where(finite, tokens, -1)
        penalised = [row for row, want in enumerate(wants) if want.penalises]
        if penalised:
            self._counts.add([slots[row] for row in penalised], tokens[penalised])
        if not reporting:
            return Sampled(tokens, None)
        tops = [wants[row].top_logprobs for row in reporting]
        values = token_logprobs(raw, tokens[reporting].clamp(min=0), max(tops))
        return Sampled(tokens, TokenLogprobs(reporting, tops, *values))

    def count(self, slot: int, tokens: Sequence[int]) -> None:
        """Tokens that a slot was given without sampling; those sampled are counted already."""
        if self._of(slot).penalises:
            for token in tokens:
                self._counts.add([slot], self._tensor([token]))

    def _draw(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: Sequence[int], filtered: bool
    ) -> torch.Tensor:
        temperature, top_p, min_p = self._reals[slots, :3].unbind(1)
        top_k, seed_low, seed_high, choice = self._integers[slots].unbind(1)
        noise = NoiseKey(seed_low, seed_high, choice, self._tensor(positions))
        return self._ops.sample(logits, temperature, Filters(top_k, top_p, min_p) if filtered else None, noise)

    def _adjust(
        self, logits: torch.Tensor, wants: Sequence[_Wants], slots: Sequence[int], positions: Sequence[int]
    ) -> bool:
        """Penalties, biases and suppressed ids, in place. Says whether there were any."""
        penalised = [row for row, want in enumerate(wants) if want.penalises]
        if penalised:
            who = [slots[row] for row in penalised]
            repetition, frequency, presence = self._reals[self._tensor(who), 3:].unbind(1)
            strengths = Penalties(repetition=repetition, frequency=frequency, presence=presence)
            counts = self._counts.of(who)
            logits[penalised] = apply_penalties(logits[penalised], *counts, strengths)
        rows: list[int] = []
        tokens: list[int] = []
        values: list[float] = []
        for row, want in enumerate(wants):
            biased, bias = want.bias
            suppressed = want.suppressed_ids if positions[row] < want.min_new_tokens else []
            rows += [row] * (len(biased) + len(suppressed))
            tokens += biased + suppressed
            values += bias + [want.suppression] * len(suppressed)
        if rows:
            index = self._tensor([rows, tokens])
            add_bias(logits, index[0], index[1], torch.tensor(values, dtype=torch.float32).to(self._device))
        return bool(penalised or rows)

    def _of(self, slot: int) -> _Wants:
        wants = self._wants[slot]
        if wants is None:
            raise ValueError(f"slot {slot} was never introduced")
        return wants

    def _tensor(self, values: Sequence[object]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._device)


def _blocks(rows: list[int], size: int) -> list[list[int]]:
    return [rows[first : first + size] for first in range(0, len(rows), size)]
