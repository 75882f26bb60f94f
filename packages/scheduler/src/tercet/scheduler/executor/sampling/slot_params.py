"""Sampling parameters of every slot, in host tables from which a step takes its rows at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tercet.kernels.ops.sampling import FILTERS
from tercet.protocol.messages.values import SAMPLING_FIELDS, SamplingParams
from tercet.scheduler.core.plan import SlotInit
from tercet.scheduler.device.staging import Array

_NEVER = float("-inf")
_LAST = -1e30
"""Bias of suppressed ids under a grammar, which may allow nothing else: the grammar is stronger."""
_WORD = 0xFFFFFFFF

PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")

_PLAIN, _FILTERED, _PENALIZED, _BIASED, _REPORTING = (1 << bit for bit in range(5))
"""Flags of a slot's rows: drawn from the whole vocabulary, drawn with filters, penalized, biased, reporting."""


@dataclass(frozen=True, eq=False)
class Draw:
    """Rows that are drawn, all from the whole vocabulary or all with filters."""

    rows: Array  # int64 [n]
    words: Array  # int64 [3, n] for `NoiseKey`: seed low, seed high, choice
    temperature: Array  # float32 [n]
    filters: Mapping[str, Array]  # each of `FILTERS` [n]; empty for draws from the whole vocabulary


@dataclass(frozen=True)
class SamplingMode:
    """The manner in which all rows of a step are sampled: drawn or greedy, without penalties, biases or
    log-probabilities.
    """

    draws: bool
    filters: bool = False


@dataclass(frozen=True, eq=False)
class Arrangement:
    """The numbers of a step's rows that are drawn, penalized, biased and reported, and their parameters."""

    draws: Sequence[Draw]
    penalized: Array  # int64 [n]
    strengths: Array  # float32 [3, n]: `PENALTIES`
    biased: Sequence[int]
    reporting: Array  # int64 [n]
    tops: Sequence[int]  # number of top tokens of each reporting row
    temperatures: Array  # float32 [n]: of each reporting row; 1 if it is greedy

    def mode(self, rows: int) -> SamplingMode | None:
        """Return the manner that all `rows` rows share; None if they differ or need other operations."""
        if len(self.penalized) or self.biased or len(self.reporting):
            return None
        if not self.draws:
            return SamplingMode(draws=False)
        draw = self.draws[0]
        if len(draw.rows) < rows:
            return None
        return SamplingMode(draws=True, filters=bool(draw.filters))


@dataclass(frozen=True, eq=False)
class _Bias:
    """Additions to a slot's logits."""

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
    """The parameters of all slots. A slot that is not in use is greedy."""

    def __init__(self, slots: int) -> None:
        self._kinds = np.zeros(slots, dtype=np.uint8)
        self._columns = {
            name: np.zeros(slots, dtype=np.float32 if SAMPLING_FIELDS[name].type is float else np.int64)
            for name in ("temperature", *FILTERS, *PENALTIES)
        }
        self._words = np.zeros((3, slots), dtype=np.int64)  # seed low, high, choice
        self._tops = np.zeros(slots, dtype=np.int64)
        self._biases: list[_Bias | None] = [None] * slots

    def introduce(self, init: SlotInit) -> None:
        """Store the parameters of a new choice."""
        slot, params = init.slot, init.sampling
        for name, column in self._columns.items():
            column[slot] = getattr(params, name)
        self._words[:, slot] = params.seed & _WORD, params.seed >> 32 & _WORD, init.choice
        self._tops[slot] = init.top_logprobs
        self._biases[slot] = _Bias.of(init)
        filters = _in_use(params, FILTERS)
        draws = params.temperature > 0 and params.top_k != 1
        kinds = {
            _PLAIN: draws and not filters,
            _FILTERED: draws and filters,
            _PENALIZED: _in_use(params, PENALTIES),
            _BIASED: self._biases[slot] is not None,
            _REPORTING: init.top_logprobs >= 0,
        }
        self._kinds[slot] = sum(kind for kind, wanted in kinds.items() if wanted)

    def has_penalties(self, slot: int) -> bool:
        """Return whether a slot has penalties."""
        return bool(self._kinds[slot] & _PENALIZED)

    def arrange(self, slots: Array) -> Arrangement:
        """Return the arrangement of rows of these slots."""
        kinds = self._kinds[slots]
        present = int(np.bitwise_or.reduce(kinds))

        def rows_of(kind: int) -> Array:
            return np.flatnonzero(kinds & kind)

        penalized, reporting = rows_of(_PENALIZED), rows_of(_REPORTING)
        return Arrangement(
            draws=[self._draw(rows_of(kind), slots, kind) for kind in (_PLAIN, _FILTERED) if present & kind],
            penalized=penalized,
            strengths=np.stack([self._columns[name][slots[penalized]] for name in PENALTIES]),
            biased=rows_of(_BIASED).tolist(),
            reporting=reporting,
            tops=self._tops[slots[reporting]].tolist(),
            temperatures=np.where(
                kinds[reporting] & (_PLAIN | _FILTERED), self._columns["temperature"][slots[reporting]], np.float32(1)
            ),
        )

    def biases(self, rows: Sequence[int], slots: Array, positions: Array) -> tuple[Array, Array]:
        """Return the biases of biased rows: int64 [2, n] row and token of each, and float32 [n] values.

        `positions` are the output positions of all rows' next tokens.
        """
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
        return np.array([biased, tokens], dtype=np.int64), np.array(values, dtype=np.float32)

    def _draw(self, rows: Array, slots: Array, kind: int) -> Draw:
        slots = slots[rows]
        filters = {name: self._columns[name][slots] for name in FILTERS} if kind == _FILTERED else {}
        return Draw(
            rows=rows,
            words=self._words.take(slots, axis=1),
            temperature=self._columns["temperature"][slots],
            filters=filters,
        )


def _in_use(params: SamplingParams, names: Sequence[str]) -> bool:
    return any(getattr(params, name) != SAMPLING_FIELDS[name].neutral for name in names)
