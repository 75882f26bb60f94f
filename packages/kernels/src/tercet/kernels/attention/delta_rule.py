"""The gated delta rule of prompts by FlashInfer, beside an implementation for all other tokens of a step.

FlashInfer's kernel takes 16-bit inputs, one decay for each head, and states [heads, value_dim, key_dim]: those of
prompts are turned before and after it. Segments of one sequence, which end where a snapshot is taken, run in turn.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from importlib import import_module
from itertools import accumulate, groupby
from typing import NamedTuple, Protocol, cast
from weakref import WeakKeyDictionary

import torch

from tercet.kernels.attention.flashinfer import missing_compiler, missing_flashinfer
from tercet.kernels.device import has_failed
from tercet.kernels.ops import recurrent
from tercet.kernels.ops.recurrent import DeltaInputs, Segment, Segments, l2norm

logger = logging.getLogger(__name__)

_ARCHITECTURES = (9, 10)
"""Major compute capabilities for which FlashInfer has the kernel."""
_DIM = 128
"""Elements of keys and of values that it takes on all of them."""
_ALLOWED = 0.02
"""Largest difference from the definition, relative to the largest value: inputs have 8 bits of precision or more."""
_LEAST = 128
"""Tokens of the shortest prompt for which states are turned."""


class DeltaRule(Protocol):
    """The signature of `ops.recurrent.gated_delta_rule`."""

    def __call__(self, inputs: DeltaInputs, states: torch.Tensor, segments: Segments) -> torch.Tensor: ...


class Library(Protocol):
    """The function of module `flashinfer` that is used here."""

    def chunk_gated_delta_rule(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor,
        output_final_state: bool,
        output_state: torch.Tensor,
        cu_seqlens: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class Round(NamedTuple):
    """Segments of different prompts, on the device of the states."""

    tokens: torch.Tensor
    starts: torch.Tensor
    """Int64 [segments + 1]: the first of `tokens` of each segment, and their number."""
    states: torch.Tensor
    sources: torch.Tensor
    """States that are copied to `snapshots` after these tokens."""
    snapshots: torch.Tensor


class Prompts(NamedTuple):
    """The prompts of a step, and its other tokens."""

    rounds: Sequence[Round]
    rest: Segments


def prompts_of(segments: Segments, device: torch.device) -> Prompts:
    """Return the prompts of a step in rounds: the first segments of all, then the second ones."""
    table = [Segment(*row) for row in segments.table.tolist()]
    sequences = [list(parts) for _, parts in groupby(table, lambda segment: segment.state)]
    singles = len(segments.singles)
    prompts = [each for each in sequences if each[0].begin >= singles and each[-1].end - each[0].begin >= _LEAST]
    states = {each[0].state for each in prompts}
    rounds = []
    for number in range(max(map(len, prompts), default=0)):
        some = [each[number] for each in prompts if number < len(each)]
        ends = accumulate((segment.end - segment.begin for segment in some), initial=0)
        taken = [(segment.state, segment.snapshot) for segment in some if segment.snapshot >= 0]
        tokens = torch.cat([torch.arange(segment.begin, segment.end) for segment in some])
        columns = [[segment.state for segment in some], [at for at, _ in taken], [to for _, to in taken]]
        parts = [torch.tensor(each, dtype=torch.int64) for each in ([*ends], *columns)]
        rounds.append(Round(*(each.to(device, non_blocking=True) for each in (tokens, *parts))))
    others = [segment for segment in segments.rest if segment.state not in states]
    return Prompts(rounds, Segments(segments.singles, others, segments.taken, segments.device))


class FlashInferDeltaRule:
    """A `DeltaRule` with FlashInfer's kernel for prompts. It is tried once for every size of heads, against the
    definition; where it is refused or wrong, the other implementation computes those layers.
    """

    def __init__(self, load: Callable[[], Library], other: DeltaRule) -> None:
        """Create the rule; `load` imports the library when the first prompt comes."""
        self._load = load
        self._other = other
        self._right: dict[tuple[int, int, torch.dtype], bool] = {}
        self._steps: WeakKeyDictionary[Segments, Prompts] = WeakKeyDictionary()

    @cached_property
    def _library(self) -> Library:
        return self._load()

    def __call__(self, inputs: DeltaInputs, states: torch.Tensor, segments: Segments) -> torch.Tensor:
        """See `tercet.kernels.ops.recurrent.gated_delta_rule`."""
        if segments not in self._steps:
            self._steps[segments] = prompts_of(segments, states.device)
        prompts = self._steps[segments]
        if not prompts.rounds or not self._fits(inputs):
            return self._other(inputs, states, segments)
        out = self._other(inputs, states, prompts.rest)
        for part in prompts.rounds:
            self._advance(part, inputs, states, out)
        return out

    def _advance(self, part: Round, inputs: DeltaInputs, states: torch.Tensor, out: torch.Tensor) -> None:
        q, k, v, decay, beta = (each[part.tokens] for each in inputs)
        q, k = (l2norm(each.float()).to(v.dtype) for each in (q, k))
        before = states[part.states].mT.contiguous()
        values, after = self._library.chunk_gated_delta_rule(
            q,
            k,
            v.contiguous(),
            g=decay.float().exp(),
            beta=beta.float().contiguous(),
            initial_state=before,
            output_final_state=True,
            output_state=torch.empty_like(before),
            cu_seqlens=part.starts,
        )
        out[part.tokens] = values.float()
        states[part.states] = after.mT
        states[part.snapshots] = states[part.sources]

    def _fits(self, inputs: DeltaInputs) -> bool:
        """Return whether the kernel computes such inputs, and rightly here."""
        q, _, v, decay, _ = inputs
        if decay.dim() != 2 or v.element_size() != 2 or not q.shape[2] == v.shape[2] == _DIM:
            return False
        sizes = q.shape[1], v.shape[1], v.dtype
        if sizes not in self._right:
            self._right[sizes] = self._is_right(*sizes, v.device)
        return self._right[sizes]

    def _is_right(self, key_heads: int, heads: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Return whether two prompts, one of them in two segments, become what the definition gives; log why not."""
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device)

        tokens = 3 * _LEAST
        q, k, v = (random(tokens, count, _DIM).to(dtype) for count in (key_heads, key_heads, heads))
        given = DeltaInputs(q, k, v, -random(tokens, heads).abs() / 10, random(tokens, heads).sigmoid())
        cut = _LEAST + 9
        rest = [Segment(0, _LEAST, 1), Segment(_LEAST, cut, 0, 2), Segment(cut, tokens, 0)]
        segments = Segments(torch.empty(0, dtype=torch.int64), rest, device=device)
        states = random(3, heads, _DIM, _DIM)
        expected_states, out = states.clone(), torch.empty(v.shape, device=device)
        expected = recurrent.gated_delta_rule(given, expected_states, segments)
        try:
            for part in prompts_of(segments, device).rounds:
                self._advance(part, given, states, out)
        except Exception as error:
            if has_failed(error):
                raise
            logger.warning("delta rule refused: heads=%d: %s", heads, str(error).strip().partition("\n")[0])
            return False
        far = [_distance(out, expected), _distance(states, expected_states)]
        right = all(each <= _ALLOWED for each in far)
        if not right:
            logger.warning("delta rule is wrong: outputs=%.3g states=%.3g heads=%d", *far, heads)
        return right


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference over the largest value."""
    return float((found - expected).abs().max() / expected.abs().max())


def delta_rule_of(device: torch.device, other: DeltaRule) -> DeltaRule:
    """Return the fastest rule for a GPU: FlashInfer's where it is installed and has the kernel, or the other one."""
    major, _ = torch.cuda.get_device_capability(device)
    if missing_flashinfer() or missing_compiler() or major not in _ARCHITECTURES:
        return other
    return FlashInferDeltaRule(lambda: cast("Library", import_module("flashinfer")), other)
