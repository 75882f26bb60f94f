"""Attention by Tercet's Triton kernels (algorithm: `tercet.kernels.triton.attention.paged_attention`)."""

from dataclasses import dataclass, replace
from functools import cache

import torch

from tercet.kernels.attention.api import AttentionBatch, AttentionParams, NewTokens
from tercet.kernels.attention.triton_plan import TritonPlan
from tercet.kernels.triton.attention.paged_attention import decode_kernel, extend_kernel
from tercet.kernels.triton.attention.rope import require_whole_heads
from tercet.kernels.triton.attention.rope_decode import rope_decode_kernel
from tercet.kernels.triton.launch import Tiling, pdl_options, power_of_two, shared_memory
from tercet.kernels.triton.launch_cache import launch
from tercet.kernels.triton.linear.fp8 import readable

_ROOMY = 160 << 10
"""Bytes of shared memory of a program on data-center GPUs; others have about 100 KiB."""

_LEAST_KEYS = 16
"""Smallest number of keys in a block that tensor cores multiply."""

DECODE_TILINGS = (
    Tiling(64, 2, 3),
    Tiling(64, 2, 5),
    Tiling(64, 4, 3),
    Tiling(64, 4, 5),
    Tiling(32, 2, 5),
    Tiling(32, 2, 7),
)
"""Tilings of decodes with head_dim 128 in 16 bits, by keys in a block; the first is in use.

With three stages, shared memory holds one block of keys and values, and the next is requested after both products; with
five it holds two, but fewer programs fit on a multiprocessor."""

EXTEND_TILINGS = (Tiling(64, 4, 3), Tiling(64, 8, 3), Tiling(128, 8, 2), Tiling(32, 4, 4))
"""Tilings of extends with head_dim 128 in 16 bits, by keys in a block; the first is in use.

With four warps, two programs fit on a multiprocessor: one multiplies while the other computes a softmax. Their threads
need all 255 registers, and spill 240 bytes as Triton 3.7 compiles them for compute capability 9.0."""


@dataclass(frozen=True, kw_only=True)
class _Blocks:
    """Block sizes of a kernel. Larger heads and wider numbers take smaller blocks, because shared memory is limited."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None
    """Register limit of a thread for decodes with many rows. It is the number needed; as an explicit limit it lets the
    compiler allocate them better."""

    @classmethod
    @cache
    def of_extend(
        cls, queries: int, group: int, dim: int, itemsize: int, cached: torch.dtype, memory: int
    ) -> "_Blocks":
        """Return the blocks for extends: tiles of at most `queries` tokens, each with `group` heads of `dim`.

        `dim` is a power of two, `itemsize` the bytes of a query element. A cache whose dtype `cached` is raw bits
        (`readable`) takes long code to widen, which grows with the tile. If the GPU has much shared `memory` (bytes),
        there are three stages: one loads a page number, a block ahead of its keys, and the keys load during the second
        product of the block before (from compute capability 9.0 on) or after it.
        """
        bits = cached == torch.uint8
        most = 32 if itemsize > 2 or dim > 256 else 64 if dim > 128 or bits else 128
        least = max(16, power_of_two(group))
        tile = max(least, min(most, power_of_two(queries * group)))
        keys = 64 if dim * itemsize <= 256 else 32
        if dim == 128 and itemsize == 2 and memory >= _ROOMY and not bits:
            return cls(queries=tile, keys=keys, warps=4, stages=3)
        blocks = cls(queries=tile, keys=keys, warps=8 if bits or tile * dim >= 128 * 128 else 4, stages=2)
        return blocks._fitted(least, dim, cached.itemsize, memory) if itemsize > 2 else blocks

    @classmethod
    @cache
    def of_decode(cls, group: int, dim: int, itemsize: int, cached: torch.dtype, memory: int) -> "_Blocks":
        """Return the blocks for a decode: one token with `group` heads of `dim` (a power of two)."""
        keys = 64 if dim * itemsize <= 256 else 32 if dim * itemsize <= 512 else 16
        warps, stages = (2, 3) if itemsize <= 2 else (4, 2)
        registers = 168 if dim == 128 and itemsize == 2 and group <= 16 and cached != torch.uint8 else None
        blocks = cls(queries=max(16, power_of_two(group)), keys=keys, warps=warps, stages=stages, registers=registers)
        return blocks._fitted(blocks.queries, dim, cached.itemsize, memory) if itemsize > 2 else blocks

    def _fitted(self, least: int, dim: int, cached: int, memory: int) -> "_Blocks":
        """Return smaller float32 blocks that fit into `memory`: fewer keys first, then fewer queries, at least `least`.

        A product that is as exact as float32 keeps queries and weights in memory twice, as the parts of their numbers.
        Keys and values have `cached` bytes a number.
        """
        blocks = self
        while 2 * blocks.keys * dim * cached + 8 * blocks.queries * (dim + blocks.keys) > memory:
            if blocks.keys > _LEAST_KEYS:
                blocks = replace(blocks, keys=blocks.keys // 2)
            elif blocks.queries > least:
                blocks = replace(blocks, queries=blocks.queries // 2)
            else:
                break  # does not fit; a server that needs this is refused at startup
        return blocks


class TritonAttention:
    """Triton backend, an `AttentionBackend`. Its decodes may be captured in a graph."""

    capturable = True
    bidirectional = False

    def __init__(self, decodes: Tiling | None = None, extends: Tiling | None = None) -> None:
        """Use the tilings, if given, for decodes and extends of any model."""
        self._plan = TritonPlan()
        self._decodes = decodes
        self._extends = extends

    def plan(self, batch: AttentionBatch) -> None:
        """See `AttentionBackend.plan`."""
        self._plan.set_batch(batch)

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        params: AttentionParams,
        key_scale: float = 1.0,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        batch, k_cache, v_cache = self._ready(q, k_cache, v_cache)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        options, scale = _options(q, k_cache, batch.page_size, params), params.scale * key_scale
        if batch.decodes:
            self._decode(batch, q, k_cache, v_cache, out, params.sinks, scale, options)
        if batch.decodes < batch.rows:
            self._extend(batch, q, k_cache, v_cache, out, params.sinks, scale, options)
        return out

    def attend_new(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, new: NewTokens, params: AttentionParams
    ) -> torch.Tensor:
        """Compute `RotatingBackend.attend_new`."""
        batch, k_cache, v_cache = self._ready(q, k_cache, v_cache)
        if batch.decodes < batch.rows:
            raise ValueError("a row of more than one new token: only decodes are rotated as they attend")
        require_whole_heads(new.table, q, new.k, new.v)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        options, scale = _options(q, k_cache, batch.page_size, params), params.scale * new.scales[0]
        self._decode(batch, q, k_cache, v_cache, out, params.sinks, scale, options, new)
        return out

    def _ready(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> tuple[AttentionBatch, torch.Tensor, torch.Tensor]:
        """Return the planned batch, and the caches as the kernels read them."""
        batch = self._plan.batch
        if q.stride()[1:] != (q.shape[2], 1) or not k_cache.is_contiguous() or not v_cache.is_contiguous():
            raise ValueError("triton attention needs contiguous heads and caches")
        return batch, readable(k_cache), readable(v_cache)

    def _decode(
        self,
        batch: AttentionBatch,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None,
        scale: float,
        options: dict[str, int | float],
        new: NewTokens | None = None,
    ) -> None:
        head_dim, kv_heads = q.shape[2], k_cache.shape[2]
        splits = self._plan.splits(out, kv_heads, window=int(options["WINDOW"]))
        group, dim, memory = int(options["GROUP"]), int(options["BLOCK_D"]), shared_memory(q.device)
        blocks = _Blocks.of_decode(group, dim, q.element_size(), k_cache.dtype, memory)
        if (tiling := self._decodes) is not None:
            blocks = replace(blocks, keys=tiling.block, warps=tiling.warps, stages=tiling.stages)
        tensors = (k_cache, v_cache, *splits.tensors(out), sinks, batch.page_table, batch.kv_lens)
        given: tuple[torch.Tensor | None, ...]
        numbers: tuple[float, ...]
        sizes = (batch.page_table.stride(0), splits.splits_per_row)
        kernel, given, numbers = decode_kernel, (q, *tensors), (q.stride(0), *sizes, scale)
        if new is not None:
            kernel = rope_decode_kernel
            given, numbers = _given_new(q, new, tensors, batch.slot_mapping, sizes, scale)
            options = options | {"BLOCK_HALF": power_of_two(head_dim // 2)}
        launch(
            kernel,
            (kv_heads, *splits.grid),
            given,
            numbers,
            **options,
            MULTIPLE_SPLITS=splits.multiple,
            BLOCK_M=blocks.queries,
            BLOCK_N=blocks.keys,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
            maxnreg=blocks.registers if splits.split_list is not None else None,
            **pdl_options(q.device),
        )
        splits.merge(out, sinks, warps=2)

    def _extend(
        self,
        batch: AttentionBatch,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None,
        scale: float,
        options: dict[str, int | float],
    ) -> None:
        group, dim, memory = int(options["GROUP"]), int(options["BLOCK_D"]), shared_memory(q.device)
        blocks = _Blocks.of_extend(batch.max_query, group, dim, q.element_size(), k_cache.dtype, memory)
        if (tiling := self._extends) is not None:
            blocks = replace(blocks, keys=tiling.block, warps=tiling.warps, stages=tiling.stages)
        queries = blocks.queries // group
        tiles = self._plan.tiles(queries, q.device)
        launch(
            extend_kernel,
            (tiles.shape[0], k_cache.shape[2]),
            (q, k_cache, v_cache, out, sinks, batch.page_table, batch.kv_lens, batch.query_start, tiles),
            (q.stride(0), batch.page_table.stride(0), scale),
            **options,
            BLOCK_M=blocks.queries,
            BLOCK_N=blocks.keys,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
            **pdl_options(q.device),
        )


def _options(q: torch.Tensor, k_cache: torch.Tensor, page_size: int, params: AttentionParams) -> dict[str, int | float]:
    """Return the compile-time constants of decodes and extends."""
    return {
        "GROUP": q.shape[1] // k_cache.shape[2],
        "HEAD_DIM": q.shape[2],
        "PAGE_SIZE": page_size,
        "WINDOW": params.window,
        "SOFTCAP": params.softcap,
        "BLOCK_D": max(16, power_of_two(q.shape[2])),
    }


def _given_new(
    q: torch.Tensor,
    new: NewTokens,
    tensors: tuple[torch.Tensor | None, ...],
    slots: torch.Tensor,
    sizes: tuple[int, int],
    scale: float,
) -> tuple[tuple[torch.Tensor | None, ...], tuple[float, ...]]:
    """Return the tensors and numbers of `rope_decode_kernel`.

    `tensors` and `sizes` are those that `decode_kernel` takes, too.
    """
    q_weight, k_weight = new.norms or (None, None)
    strides, inverses = (q.stride(0), new.k.stride(0), new.v.stride(0)), (1 / new.scales[0], 1 / new.scales[1])
    tables = (new.positions, slots, new.table, q_weight, k_weight)
    return (q, new.k, new.v, *tensors, *tables), (*strides, *sizes, new.eps, *inverses, scale)
