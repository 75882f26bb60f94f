"""Recurrent layers over the states of many sequences, in plain torch: convolution, gated delta rule, and the scans of
both Mambas.

A state pool is [states, ...]: one running state for each slot, and snapshots. A step's tokens are flat, [tokens, ...];
`Segments` name the state that each of them advances.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from tercet.kernels.ops.rmsnorm import rmsnorm

GateName = Literal["silu", "sigmoid"]
"""Activation of the gate of a normalized output."""


class Segment(NamedTuple):
    """Consecutive tokens [begin, end) of one sequence."""

    begin: int
    end: int
    state: int
    snapshot: int = -1
    """State that gets a copy after these tokens; -1 for none."""


class Schedule(NamedTuple):
    """The work of kernels on a GPU. Sequences are spans [first, last) of rows of `table`."""

    table: torch.Tensor  # int64 [segments, 4]: the fields of every segment, by state
    all: torch.Tensor  # int64 [sequences, 2]
    short: torch.Tensor  # int64 [sequences, 2]: those of few tokens, which are computed one by one
    long: torch.Tensor  # int64 [sequences, 2]: the others, whose tokens follow each other
    chunks: torch.Tensor  # int64 [chunks, 4]: begin, end, first token of the sequence, state; of the long ones


@dataclass(frozen=True, eq=False)
class Segments:
    """The tokens of a step: first one token of each of some sequences, then the rest, which may continue these."""

    singles: torch.Tensor
    """Int64 [singles] on the CPU: the state of each of the first tokens."""
    rest: Sequence[Segment]
    """Segments of one sequence follow each other."""
    taken: Sequence[tuple[int, int]] = ()
    """(token, snapshot) of the first tokens after which a snapshot is taken."""
    device: torch.device | None = None
    """Device of `schedule`; None is the CPU."""

    CHUNK: ClassVar[int] = 64
    """Tokens of a prompt that are computed at once."""
    FEW: ClassVar[int] = 16
    """Most tokens of a sequence that kernels on a GPU compute one by one, unless a decode is among them."""

    @cached_property
    def copies(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """States to copy after the first tokens, and their snapshots; None for none. Made once for all layers."""
        if not self.taken:
            return None
        tokens, snapshots = torch.tensor(self.taken).T
        return self.singles[tokens], snapshots

    @cached_property
    def table(self) -> torch.Tensor:
        """Int64 [segments, 4] on the CPU: the fields of every segment, by state. Made once for all layers."""
        taken = dict(self.taken)
        states = enumerate(self.singles.tolist())
        singles = [Segment(token, token + 1, state, taken.get(token, -1)) for token, state in states]
        segments = sorted([*singles, *self.rest], key=lambda segment: segment.state)
        return torch.tensor(segments, dtype=torch.int64).view(-1, 4)

    @cached_property
    def schedule(self) -> Schedule:
        """The segments on `device`. Sent once for all layers."""
        rows = [Segment(*row) for row in self.table.tolist()]
        firsts = [at for at, row in enumerate(rows) if at == 0 or row.state != rows[at - 1].state]
        spans = [*pairwise([*firsts, len(rows)])]
        short, long, chunks = [], [], []
        for first, last in spans:
            begin, end = rows[first].begin, rows[last - 1].end
            if begin < len(self.singles) or end - begin <= self.FEW:
                short.append((first, last))
                continue
            long.append((first, last))
            for segment in rows[first:last]:
                starts = range(segment.begin, segment.end, self.CHUNK)
                chunks += [(at, min(at + self.CHUNK, segment.end), begin, segment.state) for at in starts]
        parts = [torch.tensor(each, dtype=torch.int64).flatten() for each in (rows, spans, short, long, chunks)]
        sent = torch.cat(parts).to(self.device or "cpu", non_blocking=True)
        table, every, few, many, pieces = torch.split(sent, [len(part) for part in parts])
        return Schedule(table.view(-1, 4), every.view(-1, 2), few.view(-1, 2), many.view(-1, 2), pieces.view(-1, 4))

    def part(self, tokens: slice) -> "Segments":
        """Return the segments of some of the tokens, counted from the first of them."""
        first, last = tokens.start, tokens.stop
        kept = []
        for begin, end, state, snapshot in self.rest:
            low, high = max(begin, first), min(end, last)
            if low < high:
                kept.append(Segment(low - first, high - first, state, snapshot if high == end else -1))
        taken = [(token - first, snapshot) for token, snapshot in self.taken if first <= token < last]
        return Segments(self.singles[first:last], kept, taken, self.device)

    def write_singles(self, states: torch.Tensor, advanced: torch.Tensor) -> None:
        """Store the states after the first tokens, and take their snapshots."""
        states[self.singles] = advanced
        if self.copies is not None:
            sources, snapshots = self.copies
            states[snapshots] = states[sources]


def causal_conv(
    x: torch.Tensor,
    states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    segments: Segments,
    *,
    silu: bool = False,
) -> torch.Tensor:
    """Return the depthwise convolution of x [tokens, channels] with the tokens before each, and advance the states.

    weight is [channels, taps]. The states [states, channels, taps - 1] are the last inputs; x is rounded to their
    dtype. With `silu`, the result goes through that activation.
    """
    dtype, x = x.dtype, x.to(states.dtype)
    out = torch.empty_like(x)
    taps, singles = weight.shape[1], segments.singles
    if count := len(singles):
        known = torch.cat([states[singles], x[:count, :, None]], 2)
        segments.write_singles(states, known[..., 1:])
        out[:count] = (known * weight).sum(2)
    for state, consecutive in groupby(segments.rest, lambda segment: segment.state):
        parts = list(consecutive)
        begin, end = parts[0].begin, parts[-1].end
        known = torch.cat([states[state], x[begin:end].T], 1)
        out[begin:end] = F.conv1d(known[None], weight[:, None], groups=len(weight))[0].T
        for part in parts:
            if part.snapshot >= 0:
                states[part.snapshot] = known[:, part.end - begin : part.end - begin + taps - 1]
        states[state] = known[:, end - begin :]
    out = (out if bias is None else out + bias).to(dtype)
    return F.silu(out) if silu else out


class DeltaInputs(NamedTuple):
    """Inputs of the gated delta rule."""

    q: torch.Tensor  # [tokens, key_heads, key_dim]; a key head serves consecutive heads
    k: torch.Tensor  # [tokens, key_heads, key_dim]
    v: torch.Tensor  # [tokens, heads, value_dim]
    decay: torch.Tensor  # [tokens, heads] or [tokens, heads, key_dim]: logarithm of the factor of the state, or of rows
    beta: torch.Tensor  # [tokens, heads]: rate at which a value is replaced


def gated_delta_rule(inputs: DeltaInputs, states: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Return the outputs [tokens, heads, value_dim] of the gated delta rule in float32, and advance the states.

    Queries and keys are normalized here. The states are [states, heads, key_dim, value_dim], float32. With S the state
    before a token: S' = exp(decay) S; S = S' + k (beta (v - k S')); the output is q S / sqrt(key_dim). Sources: Gated
    Delta Networks (arXiv 2412.06464); Kimi Delta Attention, whose keys decay by channel (arXiv 2510.26692).
    """
    heads = inputs.v.shape[1]
    q, k = (l2norm(x.float()).repeat_interleave(heads // x.shape[1], 1) for x in inputs[:2])
    q, v, decay, beta = q * q.shape[2] ** -0.5, *(x.float() for x in inputs[2:])
    decay = decay.view(*decay.shape[:2], -1)
    out = torch.empty_like(v)
    if count := len(segments.singles):
        state = states[segments.singles] * decay[:count, ..., None].exp()
        delta = (v[:count] - (state * k[:count, ..., None]).sum(2)) * beta[:count, :, None]
        state = state + k[:count, ..., None] * delta[:, :, None]
        segments.write_singles(states, state)
        out[:count] = (state * q[:count, ..., None]).sum(2)
    rest = DeltaInputs(q, k, v, decay, beta)
    _advance_rest(lambda some, state: _delta_chunk(_of_heads(rest, some), state), states, segments.rest, out)
    return out


def _delta_chunk(inputs: Iterable[torch.Tensor], state: torch.Tensor) -> torch.Tensor:
    """Apply the rule to tokens of one sequence at once, and advance its state [heads, key_dim, value_dim] in place.

    The inputs are [heads, tokens, ...]; returns [tokens, heads, value_dim]. Within the chunk, the corrections of values
    solve a lower triangular system (the WY form; Yang et al., arXiv 2406.06484).
    """
    q, k, v, decay, beta = inputs
    total = decay.cumsum(1)
    between, before = _between(total), total.exp()
    system = torch.eye(k.shape[1], device=k.device) + (beta[..., None] * _products(k, k, between)).tril(-1)
    wanted = beta[..., None] * (v - (before * k) @ state)
    delta: torch.Tensor = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out: torch.Tensor = (before * q) @ state + _products(q, k, between) @ delta
    state.mul_(before[:, -1, :, None]).add_((k * _after(total)).mT @ delta)
    return out.transpose(0, 1)


def _products(a: torch.Tensor, b: torch.Tensor, between: torch.Tensor) -> torch.Tensor:
    """Return the products of a at each token with the decayed b of earlier tokens: [heads, tokens, tokens]."""
    if between.shape[3] == 1:
        return (a @ b.mT) * between[..., 0]
    return torch.einsum("htc,hsc,htsc->hts", a, b, between)


class ScanInputs(NamedTuple):
    """Inputs of the state space scan of Mamba 2."""

    c: torch.Tensor  # [tokens, groups, state_dim]: what is read; a group serves consecutive heads
    b: torch.Tensor  # [tokens, groups, state_dim]: where a value is added
    x: torch.Tensor  # [tokens, heads, head_dim]: values, already multiplied by their time step
    decay: torch.Tensor  # [tokens, heads]: logarithm of the factor of the state


def state_space_scan(inputs: ScanInputs, states: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Return the outputs [tokens, heads, head_dim] of a state space scan in float32, and advance the states.

    The states are [states, heads, head_dim, state_dim], float32. With S the state before a token: S = exp(decay) S +
    x b; the output is S c. Source: Mamba 2 (arXiv 2405.21060).
    """
    heads = inputs.x.shape[1]
    c, b = (each.float().repeat_interleave(heads // each.shape[1], 1) for each in inputs[:2])
    x, decay = inputs.x.float(), inputs.decay.float()[..., None]
    out = torch.empty_like(x)
    if count := len(segments.singles):
        state = states[segments.singles] * decay[:count, ..., None].exp()
        state = state + x[:count, ..., None] * b[:count, :, None]
        segments.write_singles(states, state)
        out[:count] = (state * c[:count, :, None]).sum(3)
    rest = ScanInputs(c, b, x, decay)
    _advance_rest(lambda some, state: _scan_chunk(_of_heads(rest, some), state), states, segments.rest, out)
    return out


def _scan_chunk(inputs: Iterable[torch.Tensor], state: torch.Tensor) -> torch.Tensor:
    """Scan tokens of one sequence at once, and advance its state [heads, head_dim, state_dim] in place.

    The inputs are [heads, tokens, ...]; returns [tokens, heads, head_dim].
    """
    c, b, x, decay = inputs
    total = decay.cumsum(1)
    out: torch.Tensor = total.exp() * (c @ state.mT) + _products(c, b, _between(total)) @ x
    state.mul_(total[:, -1, :, None].exp()).add_((x * _after(total)).mT @ b)
    return out.transpose(0, 1)


class SelectiveInputs(NamedTuple):
    """Inputs of the selective scan of Mamba 1."""

    c: torch.Tensor  # [tokens, state_dim]: what is read, of all channels
    b: torch.Tensor  # [tokens, state_dim]: where a value is added
    x: torch.Tensor  # [tokens, channels]
    step: torch.Tensor  # [tokens, channels]: time steps
    rates: torch.Tensor  # [channels, state_dim]: logarithm of the factor of the state in a unit of time


def selective_scan(inputs: SelectiveInputs, states: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Return the outputs [tokens, channels] of a selective scan in float32, and advance the states.

    The states are [states, channels, state_dim], float32. With S the state before a token: S = exp(step rates) S +
    step x b; the output is S c. Source: Mamba (arXiv 2312.00752).
    """
    c, b, x, step, rates = (each.float() for each in inputs)
    out = torch.empty_like(x)

    def advance(some: slice, state: torch.Tensor) -> torch.Tensor:
        factors = (step[some, :, None] * rates).exp()
        passed = (step[some] * x[some])[..., None] * b[some, None]
        for factor, added in zip(factors, passed, strict=True):
            added.add_(state.mul_(factor))
            state.copy_(added)
        return (passed @ c[some, :, None])[..., 0]

    if count := len(segments.singles):
        state = states[segments.singles] * (step[:count, :, None] * rates).exp()
        state = state + (step[:count] * x[:count])[..., None] * b[:count, None]
        segments.write_singles(states, state)
        out[:count] = (state @ c[:count, :, None])[..., 0]
    _advance_rest(advance, states, segments.rest, out)
    return out


def _advance_rest(
    advance: Callable[[slice, torch.Tensor], torch.Tensor],
    states: torch.Tensor,
    rest: Sequence[Segment],
    out: torch.Tensor,
) -> None:
    """Advance the states of segments chunk by chunk, and write the outputs of their tokens to `out`."""
    for begin, end, state, snapshot in rest:
        for first in range(begin, end, Segments.CHUNK):
            some = slice(first, min(first + Segments.CHUNK, end))
            out[some] = advance(some, states[state])
        if snapshot >= 0:
            states[snapshot] = states[state]


def _of_heads(inputs: Iterable[torch.Tensor], some: slice) -> Iterator[torch.Tensor]:
    """Yield some of the tokens of inputs [tokens, heads, ...], by head."""
    return (each[some].transpose(0, 1) for each in inputs)


def _between(total: torch.Tensor) -> torch.Tensor:
    """Return the decay factor from each earlier token to each token: [heads, tokens, tokens, channels].

    `total` [heads, tokens, channels] are sums of logarithms; all rows of a state decay equally if `channels` is 1.
    """
    logs = total[:, :, None] - total[:, None]
    later = torch.ones(logs.shape[1:3], dtype=torch.bool, device=logs.device).triu(1)
    return logs.masked_fill(later[..., None], -torch.inf).exp()


def _after(total: torch.Tensor) -> torch.Tensor:
    """Return the decay factor from each token to the last one: [heads, tokens, channels]."""
    return (total[:, -1:] - total).exp()


def gated_rmsnorm(
    x: torch.Tensor,
    weight: torch.Tensor,
    gate: torch.Tensor,
    eps: float,
    act: GateName,
    *,
    norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor] = rmsnorm,
) -> torch.Tensor:
    """Return the normalized x [tokens, heads, size], times act(gate) [tokens, heads * size], in the gate's dtype.

    `norm` is a version of `rmsnorm`.
    """
    wide = gate.float()
    factor = F.silu(wide) if act == "silu" else wide.sigmoid()
    return (norm(x.to(gate.dtype), weight, eps).flatten(1) * factor).to(gate.dtype)


def l2norm(x: torch.Tensor) -> torch.Tensor:
    """Divide the last dimension by its L2 norm."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
