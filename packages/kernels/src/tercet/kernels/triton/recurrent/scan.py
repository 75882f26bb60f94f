"""The state space scan of Mamba 2 over the states of many sequences. The reference is `ops.recurrent.state_space_scan`.

Decodes and draft tokens are computed token by token, prompts in chunks, both with a block of a head's state in
registers. On GPUs with little shared memory prompts are computed token by token, too.
"""

import torch
import triton
import triton.language as tl

from tercet.kernels.ops.recurrent import ScanInputs, Segments
from tercet.kernels.triton.launch import cdiv, power_of_two, shared_memory
from tercet.kernels.triton.launch_cache import launch
from tercet.kernels.triton.recurrent.sequences import (
    decay_between,
    decays_of,
    segments_of,
    state_of,
    take_snapshot,
    tokens_of,
)

_ROWS, _PROMPT_ROWS = 16, 32
"""Rows of a state in a program, for single tokens and for chunks."""
_SHARED = 512
"""Bytes of shared memory for each column of a state that chunks need, found by compiling."""


@triton.jit(do_not_specialize=["c_stride", "b_stride"])
def scan_tokens_kernel(
    c_ptr,
    b_ptr,
    x_ptr,
    decay_ptr,
    states_ptr,
    out_ptr,
    table_ptr,
    spans_ptr,
    c_stride,
    b_stride,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Advance a block of one head's state by the tokens of one sequence."""
    first, last = segments_of(spans_ptr)
    head = tl.program_id(1)
    row = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_C)
    rows, columns = row < ROWS, column < COLUMNS
    there = rows[:, None] & columns[None, :]
    within = row[:, None] * COLUMNS + column[None, :]
    state_at = state_of(states_ptr, table_ptr, first, head, within, HEADS, ROWS * COLUMNS)
    state = tl.load(state_at, mask=there, other=0.0)
    for segment in range(first, last):
        start, end = tokens_of(table_ptr, segment)
        for token in range(start, end):
            group_at = head // SHARE * COLUMNS + column
            c = tl.load(c_ptr + token * c_stride + group_at, mask=columns, other=0.0).to(tl.float32)
            b = tl.load(b_ptr + token * b_stride + group_at, mask=columns, other=0.0).to(tl.float32)
            at = (token * HEADS + head) * ROWS + row
            x = tl.load(x_ptr + at, mask=rows, other=0.0)
            state = state * tl.exp(tl.load(decay_ptr + token * HEADS + head)) + x[:, None] * b[None, :]
            tl.store(out_ptr + at, tl.sum(state * c[None, :], 1), mask=rows)
        take_snapshot(states_ptr, table_ptr, segment, head, within, state, there, HEADS, ROWS * COLUMNS)
    tl.store(state_at, state, mask=there)


@triton.jit(do_not_specialize=["c_stride", "b_stride"])
def scan_chunks_kernel(
    c_ptr,
    b_ptr,
    x_ptr,
    decay_ptr,
    states_ptr,
    out_ptr,
    table_ptr,
    spans_ptr,
    c_stride,
    b_stride,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Advance a block of one head's state by the chunks of one prompt."""
    first, last = segments_of(spans_ptr)
    head = tl.program_id(1)
    number, column = tl.arange(0, TOKENS), tl.arange(0, BLOCK_C)
    row = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    there = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
    within = row[:, None] * COLUMNS + column[None, :]
    state_at = state_of(states_ptr, table_ptr, first, head, within, HEADS, ROWS * COLUMNS)
    state = tl.load(state_at, mask=there, other=0.0)
    for segment in range(first, last):
        start, end = tokens_of(table_ptr, segment)
        for begin in range(start, end, TOKENS):
            token = begin + number
            known = token < end
            grouped = known[:, None] & (column < COLUMNS)[None, :]
            group_at = (head // SHARE * COLUMNS + column)[None, :]
            c = tl.load(c_ptr + token[:, None] * c_stride + group_at, mask=grouped, other=0.0).to(tl.float32)
            b = tl.load(b_ptr + token[:, None] * b_stride + group_at, mask=grouped, other=0.0).to(tl.float32)
            at = (token * HEADS + head)[:, None] * ROWS + row[None, :]
            values = known[:, None] & (row < ROWS)[None, :]
            x = tl.load(x_ptr + at, mask=values, other=0.0)
            total, whole = decays_of(decay_ptr, token, known, head, HEADS)
            between = decay_between(total, number[:, None] >= number[None, :])
            scores = tl.dot(c, tl.trans(b), input_precision="tf32x3") * between
            out = tl.dot(c * tl.exp(total)[:, None], tl.trans(state), input_precision="tf32x3")
            out += tl.dot(scores, x, input_precision="tf32x3")
            tl.store(out_ptr + at, out, mask=values)
            after = x * tl.exp(whole - total)[:, None]
            state = state * tl.exp(whole) + tl.dot(tl.trans(after), b, input_precision="tf32x3")
        take_snapshot(states_ptr, table_ptr, segment, head, within, state, there, HEADS, ROWS * COLUMNS)
    tl.store(state_at, state, mask=there)


def state_space_scan(inputs: ScanInputs, states: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Return the outputs of the scan in float32, and advance the states in place."""
    if states.dtype != torch.float32 or not states.is_contiguous():
        raise ValueError("states are contiguous and in float32")
    c, b = (each if each.stride()[1:] == (each.shape[2], 1) else each.contiguous() for each in inputs[:2])
    x, decay = inputs.x.float().contiguous(), inputs.decay.float().contiguous()
    heads, (rows, columns) = x.shape[1], states.shape[2:]
    out, schedule = torch.empty_like(x), segments.schedule
    sizes = {"HEADS": heads, "SHARE": heads // c.shape[1], "ROWS": rows, "COLUMNS": columns}
    strides = c.stride(0), b.stride(0)
    one_by_one = shared_memory(x.device) < _SHARED * power_of_two(columns)
    spans = schedule.all if one_by_one else schedule.short
    if len(spans):
        block = min(_ROWS, power_of_two(rows))
        launch(
            scan_tokens_kernel,
            (len(spans), heads, cdiv(rows, block)),
            (c, b, x, decay, states, out, schedule.table, spans),
            strides,
            **sizes,
            BLOCK_R=block,
            BLOCK_C=power_of_two(columns),
            num_warps=4,
        )
    if not one_by_one and (long := len(schedule.long)):
        block = max(16, min(_PROMPT_ROWS, power_of_two(rows)))
        launch(
            scan_chunks_kernel,
            (long, heads, cdiv(rows, block)),
            (c, b, x, decay, states, out, schedule.table, schedule.long),
            strides,
            **sizes,
            TOKENS=Segments.CHUNK,
            BLOCK_R=block,
            BLOCK_C=max(16, power_of_two(columns)),
            num_warps=8,
            num_stages=1,
        )
    return out
