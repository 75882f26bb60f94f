"""Sorting of (token, expert) pairs by expert, each expert padded to whole tiles, for grouped GEMMs (`moe`).

One kernel counts the pairs of each expert; the next assigns rows in their expert's tiles to pairs, and experts to
tiles. Rows are assigned first come, first served: rows of a product are independent, so the order within an expert does
not matter. The number of tiles is bounded by shapes, so the host never waits for the routing.
"""

import torch
import triton
import triton.language as tl

from tercet.kernels.triton.launch import cdiv, pdl_launch_next, pdl_options, pdl_wait, power_of_two
from tercet.kernels.triton.launch_cache import launch

_LEAST = 32
"""Minimum number of experts that are counted at once: one for each thread of a warp."""

_PAIRS_COUNTED = 4096
"""Pairs of a counting program; few programs count, because every later program sums their counts."""

_PIECE = 1024
"""Pairs that are counted at a time."""

_PAIRS_PER_PROGRAM = 256
"""Pairs of a program that assigns rows."""

_TILES = 32
"""Tiles of a program that assigns experts."""


@triton.jit(do_not_specialize=["pairs"])
def count_pairs_kernel(
    experts_ptr,  # int64 [pairs]
    counts_ptr,  # int32 [programs, experts]
    assigned_ptr,  # int32 [experts]
    pairs,
    experts,
    EXPERTS: tl.constexpr,  # a power of two
    PAIRS_COUNTED: tl.constexpr,
    PIECE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Count the pairs of each expert among PAIRS_COUNTED pairs, and reset the numbers of assigned rows."""
    program, expert = tl.program_id(0), tl.arange(0, EXPERTS)
    sizes = tl.zeros([EXPERTS], tl.int32)
    pdl_wait(PDL)
    for first in tl.range(program * PAIRS_COUNTED, tl.minimum(program * PAIRS_COUNTED + PAIRS_COUNTED, pairs), PIECE):
        pair = first + tl.arange(0, PIECE)
        there = pair < pairs
        sizes += tl.histogram(tl.load(experts_ptr + pair, mask=there, other=0).to(tl.int32), EXPERTS, mask=there)
    pdl_launch_next(PDL)
    tl.store(counts_ptr + program * experts + expert, sizes, mask=expert < experts)
    if program == 0:
        tl.store(assigned_ptr + expert, tl.zeros([EXPERTS], tl.int32), mask=expert < experts)


@triton.jit
def _assign_tiles(
    starts,  # int32 [EXPERTS]: first row of each expert
    sizes,  # number of pairs of each expert
    ends,  # first row of the next expert
    program,
    pairs_ptr,
    expert_of_ptr,
    pairs,
    experts,
    tiles,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    """Assign experts to TILES tiles, and `pairs` to their empty rows."""
    expert = tl.arange(0, starts.shape[0])
    tile = program * TILES + tl.arange(0, TILES)
    first = tile * BLOCK
    own = tl.sum(((ends[None, :] <= first[:, None]) & (expert < experts)[None, :]).to(tl.int32), 1)
    tl.store(expert_of_ptr + tile, own.to(tl.int64), mask=tile < tiles)
    stop = tl.sum(tl.where(expert[None, :] == own[:, None], (starts + sizes)[None, :], 0), 1)
    row = first[:, None] + tl.arange(0, BLOCK)[None, :]
    empty_row = tl.full([TILES, BLOCK], 0, tl.int64) + pairs
    tl.store(pairs_ptr + row, empty_row, mask=(row >= stop[:, None]) & (tile < tiles)[:, None])


@triton.jit
def _assign_rows(starts, first, experts_ptr, assigned_ptr, pairs_ptr, pairs, PAIRS: tl.constexpr):
    """Assign the next rows of their experts to PAIRS pairs from `first` on."""
    pair = first + tl.arange(0, PAIRS)
    there = pair < pairs
    own = tl.load(experts_ptr + pair, mask=there, other=0).to(tl.int32)
    place = tl.gather(starts, own, 0) + tl.atomic_add(assigned_ptr + own, 1, mask=there, sem="relaxed")
    tl.store(pairs_ptr + place, pair.to(tl.int64), mask=there)


@triton.jit(do_not_specialize=["pairs", "count_programs", "tiles"])
def assign_rows_kernel(
    experts_ptr,  # int64 [pairs]
    counts_ptr,  # int32 [counting, experts]
    assigned_ptr,  # int32 [experts]: number of assigned rows
    pairs_ptr,  # int64 [tiles * BLOCK]
    expert_of_ptr,  # int64 [tiles]
    pairs,
    experts,
    count_programs,
    tiles,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Assign experts to TILES tiles in the first programs, and rows to PAIRS pairs in the others."""
    program, expert = tl.program_id(0), tl.arange(0, EXPERTS)
    sizes = tl.zeros([EXPERTS], tl.int32)
    pdl_wait(PDL)
    for count in tl.range(count_programs):
        sizes += tl.load(counts_ptr + count * experts + expert, mask=expert < experts, other=0)
    padded = tl.cdiv(sizes, BLOCK) * BLOCK
    ends = tl.cumsum(padded, 0)
    starts = ends - padded
    if program * TILES < tiles:
        _assign_tiles(starts, sizes, ends, program, pairs_ptr, expert_of_ptr, pairs, experts, tiles, BLOCK, TILES)
    else:
        first = (program - tl.cdiv(tiles, TILES)) * PAIRS
        _assign_rows(starts, first, experts_ptr, assigned_ptr, pairs_ptr, pairs, PAIRS)
    pdl_launch_next(PDL)


def moe_align(experts: torch.Tensor, count: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort pairs by expert: (pairs int64 [tiles * block], expert of each tile int64 [tiles]).

    `experts` is [tokens, top_k] with values below `count`; pair i is entry i of the flattened tensor. Empty rows hold
    the number of pairs, empty tiles the expert `count`.
    """
    flat = experts.contiguous()
    pairs, device = flat.numel(), flat.device
    tiles = pairs // block + count  # no expert pads a whole tile
    count_programs = cdiv(pairs, _PAIRS_COUNTED)
    numbers = torch.empty(1 + count_programs, count, dtype=torch.int32, device=device)
    assigned, counts = numbers[0], numbers[1:]
    sorted_pairs = torch.empty(tiles * block, dtype=torch.int64, device=device)
    expert_of = torch.empty(tiles, dtype=torch.int64, device=device)
    options = {"EXPERTS": max(_LEAST, power_of_two(count)), **pdl_options(device)}
    launch(
        count_pairs_kernel,
        (count_programs,),
        (flat, counts, assigned),
        (pairs, count),
        PAIRS_COUNTED=_PAIRS_COUNTED,
        PIECE=_PIECE,
        **options,
    )
    launch(
        assign_rows_kernel,
        (cdiv(tiles, _TILES) + cdiv(pairs, _PAIRS_PER_PROGRAM),),
        (flat, counts, assigned, sorted_pairs, expert_of),
        (pairs, count, count_programs, tiles),
        BLOCK=block,
        PAIRS=_PAIRS_PER_PROGRAM,
        TILES=_TILES,
        **options,
    )
    return sorted_pairs, expert_of
