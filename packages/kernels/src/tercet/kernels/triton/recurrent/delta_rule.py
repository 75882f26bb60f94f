"""The gated delta rule over the states of many sequences. The reference is `ops.recurrent.gated_delta_rule`.

Decodes and draft tokens are computed token by token, with a block of a head's state in registers, as is everything on
GPUs with little shared memory. Prompts are computed in chunks: one kernel solves the triangular system of each chunk
(the WY form; Yang et al., arXiv 2406.06484), all chunks at once, and the next one advances the states from chunk to
chunk. Where keys decay by channel, a kernel before these has the products of each chunk's tokens (`delta_pairs`).
"""

import torch
import triton
import triton.language as tl

from tercet.kernels.ops.recurrent import DeltaInputs, Segments
from tercet.kernels.triton.launch import cdiv, power_of_two, shared_memory
from tercet.kernels.triton.launch_cache import launch
from tercet.kernels.triton.recurrent.delta_pairs import delta_pairs_kernel
from tercet.kernels.triton.recurrent.sequences import (
    channel_decays_of,
    decay_between,
    decays_of,
    normalized_of,
    segments_of,
    state_of,
    take_snapshot,
    tokens_of,
)

_PAIRS = 16
"""Tokens of a program of `delta_pairs_kernel`."""
_VALUES = 32
"""Columns of a state in a program."""
_SHARED = {False: 1280, True: 768}
"""Bytes of shared memory that chunks need for each row of a state, by whether keys decay by channel: from compiling."""


@triton.jit(do_not_specialize=["q_stride", "k_stride", "v_stride"])
def delta_tokens_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    beta_ptr,
    states_ptr,
    out_ptr,
    table_ptr,
    spans_ptr,
    q_stride,
    k_stride,
    v_stride,
    scale,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Advance a block of one head's state by the tokens of one sequence."""
    first, last = segments_of(spans_ptr)
    head = tl.program_id(1)
    row = tl.arange(0, BLOCK_K)
    column = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    rows, columns = row < KEY, column < VALUE
    there = rows[:, None] & columns[None, :]
    within = row[:, None] * VALUE + column[None, :]
    state_at = state_of(states_ptr, table_ptr, first, head, within, HEADS, KEY * VALUE)
    state = tl.load(state_at, mask=there, other=0.0)
    for segment in range(first, last):
        start, end = tokens_of(table_ptr, segment)
        for token in range(start, end):
            key_at = head // SHARE * KEY + row
            q = tl.load(q_ptr + token * q_stride + key_at, mask=rows, other=0.0).to(tl.float32)
            k = tl.load(k_ptr + token * k_stride + key_at, mask=rows, other=0.0).to(tl.float32)
            v = tl.load(v_ptr + token * v_stride + head * VALUE + column, mask=columns, other=0.0).to(tl.float32)
            q = q * tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale
            k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
            if BY_CHANNEL:
                decay = tl.load(decay_ptr + (token * HEADS + head) * KEY + row, mask=rows, other=0.0)
                state = state * tl.exp(decay)[:, None]
            else:
                state = state * tl.exp(tl.load(decay_ptr + token * HEADS + head))
            delta = (v - tl.sum(state * k[:, None], 0)) * tl.load(beta_ptr + token * HEADS + head)
            state += k[:, None] * delta[None, :]
            out_at = out_ptr + (token * HEADS + head) * VALUE + column
            tl.store(out_at, tl.sum(state * q[:, None], 0), mask=columns)
        take_snapshot(states_ptr, table_ptr, segment, head, within, state, there, HEADS, KEY * VALUE)
    tl.store(state_at, state, mask=there)


@triton.jit(do_not_specialize=["k_stride", "v_stride"])
def delta_chunk_kernel(
    k_ptr,
    v_ptr,
    decay_ptr,
    beta_ptr,
    keys_ptr,
    values_ptr,
    system_ptr,
    chunks_ptr,
    k_stride,
    v_stride,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Solve the system of a chunk: the corrections of its values are `values` - `keys` @ state before the chunk.

    Where keys decay by channel, `system` has the products of keys.
    """
    begin = tl.load(chunks_ptr + 4 * tl.program_id(0))
    end = tl.load(chunks_ptr + 4 * tl.program_id(0) + 1)
    head = tl.program_id(1)
    number = tl.arange(0, TOKENS)
    token, row = begin + number, tl.arange(0, BLOCK_K)
    there, rows = token < end, row < KEY
    keys = there[:, None] & rows[None, :]
    k = normalized_of(k_ptr + head // SHARE * KEY, token, there, row, rows, k_stride)
    beta = tl.load(beta_ptr + token * HEADS + head, mask=there, other=0.0)
    at = (token * HEADS + head)[:, None]
    earlier = number[:, None] > number[None, :]
    if system_ptr is None:
        total, _ = decays_of(decay_ptr, token, there, head, HEADS)
        products = tl.dot(k, tl.trans(k), input_precision="tf32x3") * decay_between(total, earlier)
        before = tl.exp(total)[:, None]
    else:
        total, _ = channel_decays_of(decay_ptr, token, there, head, row, rows, HEADS, KEY)
        products = tl.load(system_ptr + at * TOKENS + number[None, :], mask=earlier & there[:, None], other=0.0)
        before = tl.exp(total)
    system = products * beta[:, None]
    inverse = tl.where(number[:, None] == number[None, :], 1.0, 0.0)
    for index in range(1, tl.minimum(end - begin, TOKENS)):
        mine = number == index
        factors = tl.sum(tl.where(mine[:, None], system, 0.0), 0)
        solved = tl.sum(factors[:, None] * inverse, 0)
        inverse -= tl.where(mine[:, None], solved[None, :], 0.0)
    weighted = k * before * beta[:, None]
    tl.store(keys_ptr + at * KEY + row[None, :], tl.dot(inverse, weighted, input_precision="tf32x3"), mask=keys)
    for first in tl.static_range(0, VALUE, BLOCK_V):
        column = first + tl.arange(0, BLOCK_V)
        values = there[:, None] & (column < VALUE)[None, :]
        v_at = v_ptr + token[:, None] * v_stride + (head * VALUE + column)[None, :]
        v = tl.load(v_at, mask=values, other=0.0).to(tl.float32) * beta[:, None]
        solved_v = tl.dot(inverse, v, input_precision="tf32x3")
        tl.store(values_ptr + at * VALUE + column[None, :], solved_v, mask=values)


@triton.jit(do_not_specialize=["q_stride", "k_stride"])
def delta_states_kernel(
    q_ptr,
    k_ptr,
    decay_ptr,
    keys_ptr,
    values_ptr,
    scores_ptr,
    states_ptr,
    out_ptr,
    table_ptr,
    spans_ptr,
    q_stride,
    k_stride,
    scale,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Advance a block of one head's state by the chunks of one prompt."""
    first, last = segments_of(spans_ptr)
    head = tl.program_id(1)
    number, row = tl.arange(0, TOKENS), tl.arange(0, BLOCK_K)
    column = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    rows = row < KEY
    there = rows[:, None] & (column < VALUE)[None, :]
    within = row[:, None] * VALUE + column[None, :]
    state_at = state_of(states_ptr, table_ptr, first, head, within, HEADS, KEY * VALUE)
    state = tl.load(state_at, mask=there, other=0.0)
    for segment in range(first, last):
        start, end = tokens_of(table_ptr, segment)
        for begin in range(start, end, TOKENS):
            token = begin + number
            known = token < end
            at = (token * HEADS + head)[:, None]
            solved_k = tl.load(keys_ptr + at * KEY + row[None, :], mask=known[:, None] & rows[None, :], other=0.0)
            values = known[:, None] & (column < VALUE)[None, :]
            solved_v = tl.load(values_ptr + at * VALUE + column[None, :], mask=values, other=0.0)
            delta = solved_v - tl.dot(solved_k, state, input_precision="tf32x3")
            q = normalized_of(q_ptr + head // SHARE * KEY, token, known, row, rows, q_stride) * scale
            seen = number[:, None] >= number[None, :]
            if scores_ptr is None:
                k = normalized_of(k_ptr + head // SHARE * KEY, token, known, row, rows, k_stride)
                total, whole = decays_of(decay_ptr, token, known, head, HEADS)
                scores = tl.dot(q, tl.trans(k), input_precision="tf32x3") * decay_between(total, seen)
                out = tl.dot(q * tl.exp(total)[:, None], state, input_precision="tf32x3")
                k, kept = k * tl.exp(whole - total)[:, None], tl.exp(whole)
            else:
                total, whole = channel_decays_of(decay_ptr, token, known, head, row, rows, HEADS, KEY)
                out = tl.dot(q * tl.exp(total), state, input_precision="tf32x3")
                scores = tl.load(scores_ptr + at * TOKENS + number[None, :], mask=seen & known[:, None], other=0.0)
                k = normalized_of(k_ptr + head // SHARE * KEY, token, known, row, rows, k_stride)
                k, kept = k * tl.exp(whole[None, :] - total), tl.exp(whole)[:, None]
            out += tl.dot(scores, delta, input_precision="tf32x3")
            tl.store(out_ptr + at * VALUE + column[None, :], out, mask=values)
            state = state * kept + tl.dot(tl.trans(k), delta, input_precision="tf32x3")
        take_snapshot(states_ptr, table_ptr, segment, head, within, state, there, HEADS, KEY * VALUE)
    tl.store(state_at, state, mask=there)


def gated_delta_rule(inputs: DeltaInputs, states: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Return the outputs of the gated delta rule in float32, and advance the states in place."""
    if states.dtype != torch.float32 or not states.is_contiguous():
        raise ValueError("states are contiguous and in float32")
    q, k, v = (_rows(each) for each in inputs[:3])
    decay, beta = inputs.decay.float().contiguous(), inputs.beta.float().contiguous()
    heads, (key, value) = v.shape[1], states.shape[2:]
    by_channel, schedule = decay.dim() == 3, segments.schedule
    one_by_one = shared_memory(v.device) < _SHARED[by_channel] * power_of_two(key)
    out = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    sizes = {"HEADS": heads, "SHARE": heads // q.shape[1], "KEY": key, "VALUE": value}
    block_k, block_v = power_of_two(key), min(_VALUES, power_of_two(value))
    spans = schedule.all if one_by_one else schedule.short
    if len(spans):
        launch(
            delta_tokens_kernel,
            (len(spans), heads, cdiv(value, block_v)),
            (q, k, v, decay, beta, states, out, schedule.table, spans),
            (q.stride(0), k.stride(0), v.stride(0), key**-0.5),
            **sizes,
            BY_CHANNEL=by_channel,
            BLOCK_K=block_k,
            BLOCK_V=block_v,
            num_warps=4,
        )
    if not one_by_one and len(schedule.long):
        _prompts(DeltaInputs(q, k, v, decay, beta), states, out, segments, sizes)
    return out


def _prompts(
    inputs: DeltaInputs, states: torch.Tensor, out: torch.Tensor, segments: Segments, sizes: dict[str, int]
) -> None:
    """Compute the long sequences in chunks."""
    q, k, v, decay, beta = inputs
    schedule, heads, key, value = segments.schedule, sizes["HEADS"], sizes["KEY"], sizes["VALUE"]
    keys = torch.empty(len(v), heads, key, dtype=torch.float32, device=v.device)
    values = torch.empty_like(out)
    blocks = {
        "TOKENS": Segments.CHUNK,
        "BLOCK_K": max(16, power_of_two(key)),
        "BLOCK_V": max(16, min(_VALUES, power_of_two(value))),
    }
    system = scores = None
    if decay.dim() == 3:
        system, scores = torch.empty(2, len(v), heads, Segments.CHUNK, dtype=torch.float32, device=v.device)
        launch(
            delta_pairs_kernel,
            (len(schedule.chunks), heads, Segments.CHUNK // _PAIRS),
            (q, k, decay, system, scores, schedule.chunks),
            (q.stride(0), k.stride(0), key**-0.5),
            **{name: sizes[name] for name in ("HEADS", "SHARE", "KEY")},
            TOKENS=Segments.CHUNK,
            BLOCK=_PAIRS,
            BLOCK_K=blocks["BLOCK_K"],
            num_warps=4,
            num_stages=1,
        )
    launch(
        delta_chunk_kernel,
        (len(schedule.chunks), heads),
        (k, v, decay, beta, keys, values, system, schedule.chunks),
        (k.stride(0), v.stride(0)),
        **sizes,
        **blocks,
        num_warps=8,
        num_stages=1,
    )
    launch(
        delta_states_kernel,
        (len(schedule.long), heads, cdiv(value, blocks["BLOCK_V"])),
        (q, k, decay, keys, values, scores, states, out, schedule.table, schedule.long),
        (q.stride(0), k.stride(0), key**-0.5),
        **sizes,
        **blocks,
        num_warps=8,
        num_stages=1,
    )


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return x [tokens, heads, size] with contiguous rows of a token."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
