"""The selective scan of Mamba 1 over the states of many sequences. The reference is `ops.recurrent.selective_scan`.

Every sequence is computed token by token, with a block of channels of its state in registers.
"""

import torch
import triton
import triton.language as tl

from tercet.kernels.ops.recurrent import Segments, SelectiveInputs
from tercet.kernels.triton.launch import cdiv, power_of_two
from tercet.kernels.triton.launch_cache import launch
from tercet.kernels.triton.recurrent.sequences import segments_of, state_of, take_snapshot, tokens_of

_CHANNELS = 64
"""Channels of a state in a program."""


@triton.jit(do_not_specialize=["c_stride", "b_stride"])
def selective_scan_kernel(
    c_ptr,
    b_ptr,
    x_ptr,
    step_ptr,
    rates_ptr,
    states_ptr,
    out_ptr,
    table_ptr,
    spans_ptr,
    c_stride,
    b_stride,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Advance a block of the channels of a state by the tokens of one sequence."""
    first, last = segments_of(spans_ptr)
    channel = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_C)
    channels, columns = channel < CHANNELS, column < COLUMNS
    there = channels[:, None] & columns[None, :]
    within = channel[:, None] * COLUMNS + column[None, :]
    state_at = state_of(states_ptr, table_ptr, first, 0, within, 1, CHANNELS * COLUMNS)
    state = tl.load(state_at, mask=there, other=0.0)
    rates = tl.load(rates_ptr + within, mask=there, other=0.0)
    for segment in range(first, last):
        start, end = tokens_of(table_ptr, segment)
        for token in range(start, end):
            c = tl.load(c_ptr + token * c_stride + column, mask=columns, other=0.0).to(tl.float32)
            b = tl.load(b_ptr + token * b_stride + column, mask=columns, other=0.0).to(tl.float32)
            at = token * CHANNELS + channel
            step = tl.load(step_ptr + at, mask=channels, other=0.0)
            added = step * tl.load(x_ptr + at, mask=channels, other=0.0)
            state = state * tl.exp(step[:, None] * rates) + added[:, None] * b[None, :]
            tl.store(out_ptr + at, tl.sum(state * c[None, :], 1), mask=channels)
        take_snapshot(states_ptr, table_ptr, segment, 0, within, state, there, 1, CHANNELS * COLUMNS)
    tl.store(state_at, state, mask=there)


def selective_scan(inputs: SelectiveInputs, states: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Return the outputs of the scan in float32, and advance the states in place."""
    if states.dtype != torch.float32 or not states.is_contiguous():
        raise ValueError("states are contiguous and in float32")
    c, b = (each if each.stride(1) == 1 else each.contiguous() for each in inputs[:2])
    x, step, rates = (each.float().contiguous() for each in inputs[2:])
    channels, columns = states.shape[1:]
    out, schedule = torch.empty_like(x), segments.schedule
    block = min(_CHANNELS, power_of_two(channels))
    launch(
        selective_scan_kernel,
        (len(schedule.all), cdiv(channels, block)),
        (c, b, x, step, rates, states, out, schedule.table, schedule.all),
        (c.stride(0), b.stride(0)),
        CHANNELS=channels,
        COLUMNS=columns,
        BLOCK_R=block,
        BLOCK_C=power_of_two(columns),
        num_warps=4,
    )
    return out
