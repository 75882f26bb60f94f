"""The sampler: logits to tokens, each row by its slot's parameters, all rows at once.

The order is: penalties, logit bias, suppressed ids, grammar masks; then temperature, top-k, top-p, min-p and the draw
(`tercet.kernels.ops.sampling`). Reported log-probabilities are of the model's raw logits, even where a grammar allows
only one token, or of the logits that the draw begins with: changed, and divided by the temperature (`logprobs_mode`).

The parameters of rows stay on the device while the same slots are sampled: then a step sends only the values that
change with the position.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, Protocol

import numpy as np
import torch

from tercet.kernels.ops import sampler_ops
from tercet.kernels.ops.penalties import Penalties, TokenCounts, add_bias
from tercet.kernels.ops.philox import NoiseKey
from tercet.kernels.ops.sampling import FILTERS, Filters
from tercet.protocol.messages.values import unpack_ints
from tercet.scheduler.core.plan import SlotInit
from tercet.scheduler.device.staging import Array, HostToDevice
from tercet.scheduler.executor.sampling.draft_penalties import DraftTokens, penalize_drafts
from tercet.scheduler.executor.sampling.penalty_counts import PenaltyCounts
from tercet.scheduler.executor.sampling.slot_params import SamplingMode, SlotParams

Masks = Callable[[], torch.Tensor]
"""A function that waits for the bitmasks of all rows of a step: int32 [rows, ceil(vocab / 32)], on the host."""

LogprobsMode = Literal["raw", "processed"]

Agree = Callable[[torch.Tensor], torch.Tensor]
"""A function that makes the tokens of all rows equal in every rank."""

_NO_BIASES: tuple[Array, Array] = np.zeros((2, 0), dtype=np.int64), np.zeros(0, dtype=np.float32)


class SamplingOps(Protocol):
    """The interface of `tercet.kernels.ops.sampler_ops` and its faster implementations."""

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the token of each row with the largest logit; -1 where that is not finite."""
        ...

    def sample(
        self, logits: torch.Tensor, temperature: torch.Tensor, filters: Filters | None, noise: NoiseKey
    ) -> torch.Tensor:
        """Sample a token for each row; -1 if the largest logit is not finite."""
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
        """Penalize rows, in place, for the tokens of their sequences."""
        ...

    def token_logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, top: int, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return log-probabilities of tokens, and the `top` most likely ids with theirs, of all or some rows."""
        ...


@dataclass(frozen=True, eq=False)
class TokenLogprobs:
    """Log-probabilities of some rows, as tensors: entry i is of row `rows[i]`, which requests `tops[i]` top tokens."""

    rows: Sequence[int]
    tops: Sequence[int]
    chosen: torch.Tensor  # float32 [n]
    top_ids: torch.Tensor  # int64 [n, max(tops)]
    top_logprobs: torch.Tensor  # float32 [n, max(tops)]


@dataclass(frozen=True, eq=False)
class Sampled:
    """Tokens, int64 [rows], -1 if logits were not finite; log-probabilities if a row requests them."""

    tokens: torch.Tensor
    logprobs: TokenLogprobs | None


def join_sampled(parts: Sequence[Sampled]) -> Sampled:
    """Join the results of rows that were sampled in parts."""
    if len(parts) == 1:
        return parts[0]
    tokens = torch.cat([part.tokens for part in parts])
    firsts = accumulate((len(part.tokens) for part in parts), initial=0)
    reports = [(first, part.logprobs) for first, part in zip(firsts, parts, strict=False) if part.logprobs is not None]
    if not reports:
        return Sampled(tokens, None)
    widest = max(report.top_ids.shape[1] for _, report in reports)

    def padded(top: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(top, (0, widest - top.shape[1]))  # readers stop at their `tops`

    logprobs = TokenLogprobs(
        rows=[first + row for first, report in reports for row in report.rows],
        tops=[top for _, report in reports for top in report.tops],
        chosen=torch.cat([report.chosen for _, report in reports]),
        top_ids=torch.cat([padded(report.top_ids) for _, report in reports]),
        top_logprobs=torch.cat([padded(report.top_logprobs) for _, report in reports]),
    )
    return Sampled(tokens, logprobs)


@dataclass(frozen=True, eq=False)
class _Draw:
    """`slot_params.Draw` on the device; `rows` None stands for all rows."""

    rows: torch.Tensor | None
    words: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    temperature: torch.Tensor
    filters: Filters | None


@dataclass(frozen=True, eq=False)
class _Penalized:
    """Rows with penalties, the indices of their counts, and their penalties."""

    rows: Array
    numbers: torch.Tensor  # `rows` on the device
    sequences: torch.Tensor
    strengths: Penalties


@dataclass(frozen=True, eq=False)
class _Rows:
    """The sampling parameters of a step's rows, on the device; valid until a slot gets a new choice."""

    slots: Array
    draws: Sequence[_Draw]
    penalized: _Penalized | None
    biased: Sequence[int]
    reporting: torch.Tensor | None
    reporting_rows: Sequence[int]
    tops: Sequence[int]
    temperatures: torch.Tensor | None  # of the reporting rows, [n, 1], for processed log-probabilities
    mode: SamplingMode | None


class _FixedParams:
    """The parameters of rows that share one manner, at fixed addresses that CUDA graphs read."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.rows: _Rows | None = None  # the rows that were written last
        self._words = torch.zeros(3, slots, dtype=torch.int64, device=device)
        self._temperature = torch.ones(slots, device=device)
        # padding rows keep one token, which is drawn fastest
        strictest = zip(FILTERS, (1, 0.0, 1.0), strict=True)
        self._filters = {name: torch.full((slots,), value, device=device) for name, value in strictest}

    def write(self, draw: _Draw) -> None:
        """Write the parameters of the first rows."""
        count = len(draw.temperature)
        for kept, given in zip(self._words, draw.words, strict=True):
            kept[:count] = given
        self._temperature[:count] = draw.temperature
        if draw.filters is not None:
            for name, values in self._filters.items():
                values[:count] = getattr(draw.filters, name)

    def first(self, rows: int, mode: SamplingMode) -> _Draw:
        """Return the first rows as a draw."""
        seed_low, seed_high, choice = self._words[:, :rows].unbind()
        filters = None
        if mode.filters:
            filters = Filters(**{name: values[:rows] for name, values in self._filters.items()})
        return _Draw(None, (seed_low, seed_high, choice), self._temperature[:rows], filters)


class Sampler:
    """The sampling parameters of all slots and, for slots with penalties, the counts of their tokens, on the device."""

    def __init__(
        self,
        slots: int,
        vocab_size: int,
        device: torch.device,
        ops: SamplingOps = sampler_ops,
        agree: Agree = lambda tokens: tokens,
        logprobs_mode: LogprobsMode = "raw",
    ) -> None:
        """Create a sampler whose tokens pass through `agree`."""
        self._processed = logprobs_mode == "processed"
        self._ops = ops
        self._agree = agree
        self._to_device = HostToDevice(device)
        self._params = SlotParams(slots)
        self._rows: _Rows | None = None
        self._fixed = _FixedParams(slots, device)
        self._counts = PenaltyCounts(vocab_size, device)
        # slots and appended tokens that are not counted yet
        self._appended: deque[tuple[int, Sequence[int]]] = deque()

    def introduce(self, inits: Sequence[SlotInit]) -> None:
        """Store the parameters of new choices, and count their known tokens."""
        self._count_appended()
        for init in inits:
            self._rows = None
            self._params.introduce(init)
            self._counts.drop(init.slot)
            if self._params.has_penalties(init.slot):
                self._counts.introduce(init.slot, unpack_ints(init.tokens), init.prompt_tokens)

    def sample(
        self,
        logits: torch.Tensor,
        slots: Sequence[int] | Array,
        positions: Sequence[int] | Array,
        masks: Masks | None = None,
        *,
        sent_positions: torch.Tensor | None = None,
        drafts: DraftTokens | None = None,
        first: int = 0,
    ) -> Sampled:
        """Sample one token for each row. `logits` [rows, vocab], of any floating dtype, are overwritten.

        `positions` are the output positions of the tokens to be sampled: 0 is the first after the prompt;
        `sent_positions` are the same on the logits' device, int64. A row whose mask allows no token gets -1. Only a
        penalty or a bias makes a float32 copy of the logits. If this raises, no token was counted: the rows can be
        sampled again, from new logits.

        In a step with draft tokens, the rows are those of `drafts` from `first` on. Then tokens are counted only in
        `count_accepted`.
        """
        self._count_appended()
        rows = self._rows_of(np.asarray(slots))
        positions = np.asarray(positions)
        if sent_positions is None:
            (sent_positions,) = self._to_device.send([positions])
        biased, biases = self._params.biases(rows.biased, rows.slots, positions) if rows.biased else _NO_BIASES
        changes = rows.penalized is not None or len(biases) > 0 or masks is not None
        keeps_raw = rows.reporting is not None and changes and not self._processed
        raw = logits[rows.reporting] if keeps_raw else None
        finite = self._ops.greedy(logits) >= 0 if changes else None  # of what the model said: a mask may hide it
        if rows.penalized is not None or len(biases):
            logits = logits.float()  # bfloat16 would lose what is small beside a logit
        if rows.penalized is not None:
            self._penalize(logits, rows.penalized, drafts, first)
        if len(biases):
            places, values = self._to_device.send([biased, biases])
            add_bias(logits, places[0], places[1], values)
        if masks is not None:
            self._ops.apply_bitmask_(logits, self._to_device.send([masks().numpy()])[0])
        tokens = self._choose(logits, rows.draws, sent_positions)
        if finite is not None:
            tokens = torch.where(finite, tokens, -1)
        tokens = self._agree(tokens)
        logprobs = self._report(logits, raw, rows, tokens)
        if rows.penalized is not None and drafts is None:
            self._counts.add(rows.penalized.sequences, tokens[rows.penalized.numbers])
        return Sampled(tokens, logprobs)

    def has_penalties(self, slots: Array) -> bool:
        """Return whether a slot has penalties, so that its tokens depend on earlier ones."""
        return self._rows_of(slots).penalized is not None

    def count_accepted(self, slots: Sequence[int] | Array, tokens: torch.Tensor, drafts: DraftTokens) -> None:
        """Count the tokens of a step with draft tokens, except those after a rejected draft token."""
        penalized = self._rows_of(np.asarray(slots)).penalized
        if penalized is not None:
            tokens = torch.where(drafts.right(tokens, self._to_device), tokens, -1)
            self._counts.add(penalized.sequences, tokens[penalized.numbers])

    def _penalize(self, logits: torch.Tensor, penalized: _Penalized, drafts: DraftTokens | None, first: int) -> None:
        """Penalize rows, in place, for their sequences' tokens and draft tokens."""
        sequences, strengths, counts = penalized.sequences, penalized.strengths, self._counts.table
        repeated = None if drafts is None else drafts.repeated(penalized.rows, first)
        if repeated is None:
            self._ops.apply_penalties_(logits, penalized.numbers, counts, sequences, strengths)
            return
        rows, tokens = self._to_device.send([repeated.rows, repeated.tokens])
        before = logits[rows[:, None], tokens]
        self._ops.apply_penalties_(logits, penalized.numbers, counts, sequences, strengths)
        penalize_drafts(logits, before, repeated, counts, sequences, strengths, self._to_device)

    def mode(self, slots: Array) -> SamplingMode | None:
        """Return the manner that all rows of these slots share, and write it for `sample_uniform`; None if they
        differ.
        """
        rows = self._rows_of(slots)
        if rows.mode is not None and rows.mode.draws and self._fixed.rows is not rows:
            self._fixed.write(rows.draws[0])
            self._fixed.rows = rows
        return rows.mode

    def sample_uniform(self, logits: torch.Tensor, mode: SamplingMode, positions: torch.Tensor) -> torch.Tensor:
        """Sample the rows of the last `mode` call, and padding rows, from fixed memory only. See `sample`."""
        draws = [self._fixed.first(len(logits), mode)] if mode.draws else []
        return self._agree(self._choose(logits, draws, positions))

    def count(self, slot: int, tokens: Sequence[int]) -> None:
        """Count tokens that were appended without sampling; sampled ones are counted already.

        Any thread may call this. The sampling thread counts them before it next samples, because only it changes the
        counts.
        """
        if self._params.has_penalties(slot):
            self._appended.append((slot, tokens))

    def _count_appended(self) -> None:
        """Count appended tokens. If this raises, the rest is counted the next time."""
        while self._appended:
            slot, tokens = self._appended[0]
            rows = self._counts.rows([slot]) * len(tokens)
            self._counts.add(*self._to_device.send([_integers(rows), _integers(tokens)]))
            self._appended.popleft()

    def _rows_of(self, slots: Array) -> _Rows:
        """Return the parameters of rows of these slots, from the last step if they are the same."""
        rows = self._rows
        if rows is None or not (rows.slots is slots or np.array_equal(rows.slots, slots)):
            rows = self._rows = self._arrange(slots)
        return rows

    def _arrange(self, slots: Array) -> _Rows:
        step = self._params.arrange(slots)
        draws = []
        for draw in step.draws:
            rows, words, temperature, *filters = self._to_device.send(
                [draw.rows, draw.words, draw.temperature, *draw.filters.values()]
            )
            some = rows if len(rows) < len(slots) else None
            seed_low, seed_high, choice = words.unbind()
            kept = Filters(*filters) if filters else None
            draws.append(_Draw(some, (seed_low, seed_high, choice), temperature, kept))
        penalized = None
        if len(step.penalized):
            sequences = _integers(self._counts.rows(slots[step.penalized].tolist()))
            rows, sent, sent_strengths = self._to_device.send([step.penalized, sequences, step.strengths])
            repetition, frequency, presence = sent_strengths.unbind()
            strengths = Penalties(repetition=repetition, frequency=frequency, presence=presence)
            penalized = _Penalized(step.penalized, rows, sent, strengths)
        reporting, temperatures = None, None
        if len(step.reporting) and self._processed:
            reporting, temperatures = self._to_device.send([step.reporting, step.temperatures[:, None]])
        elif len(step.reporting):
            [reporting] = self._to_device.send([step.reporting])
        return _Rows(
            slots=slots,
            draws=draws,
            penalized=penalized,
            biased=step.biased,
            reporting=reporting,
            reporting_rows=step.reporting.tolist(),
            tops=step.tops,
            temperatures=temperatures,
            mode=step.mode(len(slots)),
        )

    def _choose(self, logits: torch.Tensor, draws: Sequence[_Draw], positions: torch.Tensor) -> torch.Tensor:
        """Return a token for each row, drawn or greedy; -1 if the largest logit is not finite."""
        if len(draws) == 1 and draws[0].rows is None:
            return self._draw(logits, draws[0], positions)
        tokens = self._ops.greedy(logits)
        for draw in draws:
            tokens[draw.rows] = self._draw(logits[draw.rows], draw, positions[draw.rows])
        return tokens

    def _draw(self, logits: torch.Tensor, draw: _Draw, positions: torch.Tensor) -> torch.Tensor:
        return self._ops.sample(logits, draw.temperature, draw.filters, NoiseKey(*draw.words, positions))

    def _report(
        self, logits: torch.Tensor, raw: torch.Tensor | None, rows: _Rows, tokens: torch.Tensor
    ) -> TokenLogprobs | None:
        """Return log-probabilities of the reporting rows; `raw` are their logits if the step's were changed."""
        if rows.reporting is None:
            return None
        said, top = tokens[rows.reporting].clamp(min=0), max(rows.tops)
        if rows.temperatures is not None:
            raw = logits[rows.reporting].float() / rows.temperatures
        if raw is None:
            scores = self._ops.token_logprobs(logits, said, top, rows.reporting)
        else:
            scores = self._ops.token_logprobs(raw, said, top)
        return TokenLogprobs(rows.reporting_rows, rows.tops, *scores)


def _integers(numbers: Any) -> Array:
    return np.array(numbers, dtype=np.int64)
