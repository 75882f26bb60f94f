"""Causal convolution over the states of many sequences. The reference is `ops.recurrent.causal_conv`.

Decodes and draft tokens are convolved one by one. The tokens of prompts are independent of each other: all are
convolved at once, over the inputs and the state before them, and the states are written after that.
"""

import torch
import triton
import triton.language as tl

from tercet.kernels.ops.recurrent import Segments
from tercet.kernels.triton.launch import cdiv, power_of_two
from tercet.kernels.triton.launch_cache import launch
from tercet.kernels.triton.recurrent.sequences import segments_of, state_of, take_snapshot, tokens_of

_CHANNELS = 256
"""Channels of a program for single tokens."""
_TILE = 64
"""Channels of a program for the tokens of prompts."""


@triton.jit
def moved(window, by, WIDTH: tl.constexpr):
    """Return a window [channels, WIDTH] of inputs whose first `by` are gone; zeros follow the rest."""
    slot = tl.arange(0, WIDTH)
    kept = slot[None, :] == (slot + by)[:, None]
    return tl.sum(window[:, None, :] * tl.where(kept, 1.0, 0.0)[None, :, :], 2)


@triton.jit(do_not_specialize=["stride"])
def conv_tokens_kernel(
    x_ptr,
    states_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    table_ptr,
    spans_ptr,
    stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Convolve the tokens of one sequence one after the other, with the last inputs in registers."""
    first, last = segments_of(spans_ptr)
    channel, slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    there = channel < CHANNELS
    kept = there[:, None] & (slot < TAPS - 1)[None, :]
    within = channel[:, None] * (TAPS - 1) + slot[None, :]
    state_at = state_of(states_ptr, table_ptr, first, 0, within, 1, CHANNELS * (TAPS - 1))
    window = tl.load(state_at, mask=kept, other=0.0).to(tl.float32)
    weights = tl.load(weight_ptr + channel[:, None] * TAPS + slot[None, :], mask=kept, other=0.0).to(tl.float32)
    newest = tl.load(weight_ptr + channel * TAPS + TAPS - 1, mask=there, other=0.0).to(tl.float32)
    for segment in range(first, last):
        start, end = tokens_of(table_ptr, segment)
        for token in range(start, end):
            x = tl.load(x_ptr + token * stride + channel, mask=there, other=0.0).to(tl.float32)
            total = tl.sum(window * weights, 1) + x * newest
            if bias_ptr is not None:
                total += tl.load(bias_ptr + channel, mask=there, other=0.0).to(tl.float32)
            if SILU:
                total = total * tl.sigmoid(total)
            tl.store(out_ptr + token * CHANNELS + channel, total.to(out_ptr.dtype.element_ty), mask=there)
            window = tl.where((slot == TAPS - 2)[None, :], x[:, None], moved(window, 1, WIDTH))
        take_snapshot(states_ptr, table_ptr, segment, 0, within, window, kept, 1, CHANNELS * (TAPS - 1))
    tl.store(state_at, window.to(states_ptr.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["stride"])
def conv_chunk_kernel(
    x_ptr,
    states_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    chunks_ptr,
    stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    TOKENS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Convolve up to TOKENS tokens of a prompt, whose sequence begins at `origin` in this step."""
    at = chunks_ptr + 4 * tl.program_id(0)
    begin, end, origin, state = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    token = begin + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = (token < end)[:, None] & (channel < CHANNELS)[None, :]
    state_at = states_ptr + (state * CHANNELS + channel)[None, :] * (TAPS - 1)
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        source = token - (TAPS - 1) + tap
        new = (source >= origin)[:, None]
        x = tl.load(x_ptr + source[:, None] * stride + channel[None, :], mask=there & new, other=0.0).to(tl.float32)
        slot = source - origin + TAPS - 1
        old = tl.load(state_at + slot[:, None], mask=there & (new == 0), other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + channel * TAPS + tap, mask=channel < CHANNELS, other=0.0).to(tl.float32)
        total += (x + old) * weight[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + channel, mask=channel < CHANNELS, other=0.0).to(tl.float32)[None, :]
    if SILU:
        total = total * tl.sigmoid(total)
    out_at = out_ptr + token[:, None] * CHANNELS + channel[None, :]
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["stride"])
def conv_states_kernel(
    x_ptr,
    states_ptr,
    table_ptr,
    spans_ptr,
    stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the snapshots of a prompt's segments, then its state: the last inputs before the end of each."""
    first, last = segments_of(spans_ptr)
    channel, slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    there = channel < CHANNELS
    kept = there[:, None] & (slot < TAPS - 1)[None, :]
    within = channel[:, None] * (TAPS - 1) + slot[None, :]
    origin, _ = tokens_of(table_ptr, first)
    state_at = state_of(states_ptr, table_ptr, first, 0, within, 1, CHANNELS * (TAPS - 1))
    before = tl.load(state_at, mask=kept, other=0.0).to(tl.float32)
    window = before
    for segment in range(first, last):
        _, end = tokens_of(table_ptr, segment)
        source = end - (TAPS - 1) + slot
        new = kept & (source >= origin)[None, :]
        x = tl.load(x_ptr + source[None, :] * stride + channel[:, None], mask=new, other=0.0).to(tl.float32)
        window = tl.where(new, x, moved(before, end - origin, WIDTH))
        take_snapshot(states_ptr, table_ptr, segment, 0, within, window, kept, 1, CHANNELS * (TAPS - 1))
    tl.store(state_at, window.to(states_ptr.dtype.element_ty), mask=kept)


def causal_conv(
    x: torch.Tensor,
    states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    segments: Segments,
    *,
    silu: bool = False,
) -> torch.Tensor:
    """Return the convolution of x, whose rows may be strided, and advance the states."""
    if x.stride(1) != 1 or not states.is_contiguous() or not weight.is_contiguous():
        raise ValueError("channels, states and weights of a convolution must be contiguous")
    channels, taps = weight.shape
    if taps < 2:
        raise ValueError("a convolution has two taps or more")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    schedule, strides, width = segments.schedule, (x.stride(0),), power_of_two(taps - 1)
    sizes = {"CHANNELS": channels, "TAPS": taps}
    block = min(_CHANNELS, power_of_two(channels))
    blocks = cdiv(channels, block)
    if short := len(schedule.short):
        tensors = x, states, weight, bias, out, schedule.table, schedule.short
        shape = {**sizes, "WIDTH": width, "SILU": silu, "BLOCK": block}
        launch(conv_tokens_kernel, (short, blocks), tensors, strides, **shape, num_warps=4)
    if long := len(schedule.long):
        tile = min(_TILE, block)
        grid = len(schedule.chunks), cdiv(channels, tile)
        pieces = x, states, weight, bias, out, schedule.chunks
        shape = {**sizes, "TOKENS": Segments.CHUNK, "SILU": silu, "BLOCK": tile}
        launch(conv_chunk_kernel, grid, pieces, strides, **shape, num_warps=4)
        after = x, states, schedule.table, schedule.long
        launch(conv_states_kernel, (long, blocks), after, strides, **sizes, WIDTH=width, BLOCK=block, num_warps=4)
    return out
