"""`SlotParams`: how every slot is sampled, in tables on the host, from which a step takes those of its rows at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tercet.scheduler.core.plan import SlotInit
from tercet.scheduler.executor.uploads import Array

_NEVER = float("-inf")
_LAST = -1e30
"""Added to suppressed ids where a grammar might allow nothing else: the grammar is stronger."""
_WORD = 0xFFFFFFFF

_PLAIN, _FILTERED, _PENALISED, _BIASED, _REPORTING = (1 << bit for bit in range(5))
"""What is done with a slot's rows: a draw from everything or from what filters keep, ..."""


@dataclass(frozen=True, eq=False)
class Draw:
    """Rows that are drawn, all from everything or all from what their filters keep."""

    rows: Array
    arrays: Sequence[Array]
    """int64 [4, n], the words of `NoiseKey`; temperature [n]; and with filters top_k, top_p and min_p [n]."""


@dataclass(frozen=True, eq=False)
class Arrangement:
    """What the host knows of a step before it runs: numbers of rows, and what each of them is given."""

    draws: Sequence[Draw]
    penalised: Array  # int64 [n]
    strengths: Array  # float32 [3, n]: repetition, frequency, presence
    biased: Array  # int64 [2, n]: rows and tokens, a row as often as it has biases
    biases: Array  # float32 [n]
    reporting: Array  # int64 [n]
    tops: Sequence[int]  # of the reporting rows

    @property
    def changes(self) -> bool:
        """Whether any logit is changed."""
        return bool(len(self.penalised) or len(self.biases))


@dataclass(frozen=True, eq=False)
class _Bias:
    """What is added to a slot's logits."""

    tokens: Sequence[int]
    values: Sequence[float]
    suppressed_ids: Sequence[int]
    suppression: float
    min_new_tokens: int

    @classmethod
    def of(cls, init: SlotInit) -> "_Bias | None":
        params = init.sampling
        suppressed = init.suppressed_ids if params.min_new_tokens else []
        if not params.logit_bias and not suppressed:
            return None
        return cls(
            tokens=[*params.logit_bias.keys()],
            values=[*params.logit_bias.values()],
            suppressed_ids=suppressed,
            suppression=_NEVER if params.grammar is None else _LAST,
            min_new_tokens=params.min_new_tokens,
        )


class SlotParams:
    """The parameters of all slots. A slot that was never introduced is greedy."""

    def __init__(self, slots: int) -> None:
        self._kinds = np.zeros(slots, dtype=np.uint8)
        self._reals = np.zeros((6, slots), dtype=np.float32)  # temperature, top_p, min_p, then as `strengths`
        self._integers = np.zeros((4, slots), dtype=np.int64)  # seed low, high, choice, top_k
        self._tops = np.zeros(slots, dtype=np.int64)
        self._biases: list[_Bias | None] = [None] * slots

    def introduce(self, init: SlotInit) -> None:
        """Take the parameters of a choice that takes a slot."""
        slot, params = init.slot, init.sampling
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self._reals[:, slot] = (params.temperature, params.top_p, params.min_p, *penalties)
        self._integers[:, slot] = params.seed & _WORD, params.seed >> 32 & _WORD, init.choice, params.top_k
        self._tops[slot] = init.top_logprobs
        self._biases[slot] = _Bias.of(init)
        filters = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        draws = params.temperature > 0 and params.top_k != 1
        kinds = {
            _PLAIN: draws and not filters,
            _FILTERED: draws and filters,
            _PENALISED: penalties != (1, 0, 0),
            _BIASED: self._biases[slot] is not None,
            _REPORTING: init.top_logprobs >= 0,
        }
        self._kinds[slot] = sum(kind for kind, wanted in kinds.items() if wanted)

    def penalises(self, slot: int) -> bool:
        """Whether a slot needs to know what it has said."""
        return bool(self._kinds[slot] & _PENALISED)

    def arrange(self, slots: Array, positions: Array) -> Arrangement:
        """Of rows of these slots, whose next tokens have these output positions."""
        kinds = self._kinds[slots]
        present = int(np.bitwise_or.reduce(kinds))

        def rows_of(kind: int) -> Array:
            return np.flatnonzero(kinds & kind) if present & kind else _integers([])

        penalised, reporting = rows_of(_PENALISED), rows_of(_REPORTING)
        biased, biases = self._biases_of(rows_of(_BIASED).tolist(), slots, positions)
        return Arrangement(
            draws=[self._draw(rows_of(kind), slots, positions, kind) for kind in (_PLAIN, _FILTERED) if present & kind],
            penalised=penalised,
            strengths=self._reals[3:].take(slots[penalised], axis=1),
            biased=biased,
            biases=biases,
            reporting=reporting,
            tops=self._tops[slots[reporting]].tolist(),
        )

    def _draw(self, rows: Array, slots: Array, positions: Array, kind: int) -> Draw:
        slots = slots[rows]
        integers, reals = self._integers.take(slots, axis=1), self._reals[:3].take(slots, axis=1)
        filters = (integers[3].copy(), *reals[1:]) if kind == _FILTERED else ()
        integers[3] = positions[rows]
        return Draw(rows, [integers, reals[0], *filters])

    def _biases_of(self, rows: Sequence[int], slots: Array, positions: Array) -> tuple[Array, Array]:
        """(rows and tokens [2, n], what is added to their logits)."""
        biased: list[int] = []
        tokens: list[int] = []
        values: list[float] = []
        for row in rows:
            bias = self._biases[slots[row]]
            if bias is None:
                continue
            suppressed = bias.suppressed_ids if positions[row] < bias.min_new_tokens else []
            biased += [row] * (len(bias.tokens) + len(suppressed))
            tokens += [*bias.tokens, *suppressed]
            values += [*bias.values, *[bias.suppression] * len(suppressed)]
        return _integers([biased, tokens]), np.array(values, dtype=np.float32)


def _integers(numbers: Any) -> Array:
    return np.array(numbers, dtype=np.int64)
