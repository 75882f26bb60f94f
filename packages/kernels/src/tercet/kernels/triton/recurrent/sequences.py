"""Parts that kernels over recurrent states share: the segments of a sequence, its state, snapshots, and decays."""

import triton
import triton.language as tl


@triton.jit
def segments_of(spans_ptr):
    """Return (first, end) of the segments of this program's sequence."""
    at = spans_ptr + 2 * tl.program_id(0)
    return tl.load(at), tl.load(at + 1)


@triton.jit
def tokens_of(table_ptr, segment):
    """Return (first, end) of the tokens of a segment."""
    at = table_ptr + 4 * segment
    return tl.load(at), tl.load(at + 1)


@triton.jit
def state_of(states_ptr, table_ptr, segment, head, within, HEADS: tl.constexpr, SIZE: tl.constexpr):
    """Return the address of a head's state [SIZE] of a segment's sequence, at the offsets `within`."""
    return states_ptr + (tl.load(table_ptr + 4 * segment + 2) * HEADS + head) * SIZE + within


@triton.jit
def take_snapshot(states_ptr, table_ptr, segment, head, within, state, there, HEADS: tl.constexpr, SIZE: tl.constexpr):
    """Store a state to the snapshot that is taken at the end of a segment, if there is one."""
    snapshot = tl.load(table_ptr + 4 * segment + 3)
    if snapshot >= 0:
        at = states_ptr + (snapshot * HEADS + head) * SIZE + within
        tl.store(at, state.to(states_ptr.dtype.element_ty), mask=there)


@triton.jit
def decays_of(decay_ptr, token, known, head, HEADS: tl.constexpr):
    """Return (logarithm of the decay from before a chunk up to each token, and of the whole chunk)."""
    decay = tl.load(decay_ptr + token * HEADS + head, mask=known, other=0.0)
    return tl.cumsum(decay, 0), tl.sum(decay, 0)


@triton.jit
def channel_decays_of(decay_ptr, token, known, head, row, rows, HEADS: tl.constexpr, KEY: tl.constexpr):
    """Return the same as `decays_of` for each row of a state: ([tokens, rows], [rows])."""
    at = decay_ptr + (token * HEADS + head)[:, None] * KEY + row[None, :]
    decay = tl.load(at, mask=known[:, None] & rows[None, :], other=0.0)
    return tl.cumsum(decay, 0), tl.sum(decay, 0)


@triton.jit
def normalized_of(ptr, token, known, row, rows, stride):
    """Return the queries or keys [tokens, rows] of one head, divided by their norms."""
    x = tl.load(ptr + token[:, None] * stride + row[None, :], mask=known[:, None] & rows[None, :], other=0.0)
    x = x.to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]


@triton.jit
def decay_between(total, seen):
    """Return the decay from each token to each, 0 where one is not `seen`."""
    return tl.exp(tl.where(seen, total[:, None] - total[None, :], float("-inf")))
