"""Attention by our own Triton kernels: `tercet.kernels.triton.attention.paged_attention` tells how."""

from dataclasses import dataclass, replace
from functools import cache

import torch

from tercet.kernels.attention.api import AttentionBatch, NewTokens
from tercet.kernels.attention.triton_plan import TritonPlan
from tercet.kernels.triton.attention.paged_attention import decode_kernel, extend_kernel
from tercet.kernels.triton.attention.rope import require_whole_heads
from tercet.kernels.triton.attention.rope_decode import rope_decode_kernel
from tercet.kernels.triton.launch import Tiling, early_start, power_of_two, shared_memory
from tercet.kernels.triton.launch_cache import launch
from tercet.kernels.triton.linear.fp8 import readable

_ROOMY = 160 << 10
"""Bytes of shared memory that a program may have, on a server's GPU; others have about 100 KiB."""

_LEAST_KEYS = 16
"""Of a block, the fewest that tensor cores multiply."""

DECODE_TILINGS = (
    Tiling(64, 2, 3),
    Tiling(64, 2, 5),
    Tiling(64, 4, 3),
    Tiling(64, 4, 5),
    Tiling(32, 2, 5),
    Tiling(32, 2, 7),
)
"""Of decodes with heads of 128 in 16 bits, by the keys of a block; the first is in use.

With three stages shared memory has one block of keys and values, and the next is asked for once both products are done;
with five it has two, and a multiprocessor has room for fewer programs.
"""


@dataclass(frozen=True, kw_only=True)
class _Blocks:
    """How a kernel is cut up. Larger heads and wider numbers take smaller blocks, for they share the same memory."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None
    """The most of a thread, where rows are many: what it needs, which the compiler places better if it is told so."""

    @classmethod
    @cache
    def of_extend(
        cls, queries: int, group: int, dim: int, itemsize: int, cached: torch.dtype, memory: int
    ) -> "_Blocks":
        """For tiles of `queries` tokens at most, each with `group` heads of `dim` (a power of two).

        Queries have `itemsize` bytes a number. A cache that is `cached` as bits (`readable`) takes much code to widen,
        which grows with the tile. On a GPU with much shared `memory`, in bytes, there are three stages: a page's number
        is one of them, read a block ahead of its keys, and these beside the second product of the block before (from
        compute capability 9.0 on) or after it.
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
        """For one token with `group` heads of `dim` (a power of two)."""
        keys = 64 if dim * itemsize <= 256 else 32 if dim * itemsize <= 512 else 16
        warps, stages = (2, 3) if itemsize <= 2 else (4, 2)
        registers = 168 if dim == 128 and itemsize == 2 and group <= 16 and cached != torch.uint8 else None
        blocks = cls(queries=max(16, power_of_two(group)), keys=keys, warps=warps, stages=stages, registers=registers)
        return blocks._fitted(blocks.queries, dim, cached.itemsize, memory) if itemsize > 2 else blocks

    def _fitted(self, least: int, dim: int, cached: int, memory: int) -> "_Blocks":
        """In float32, with fewer keys and then queries, `least` or more, where there is not the memory for all.

        A product that is as exact as float32 has queries and weights there twice, as the parts of their numbers; keys
        and values have `cached` bytes a number.
        """
        blocks = self
        while 2 * blocks.keys * dim * cached + 8 * blocks.queries * (dim + blocks.keys) > memory:
            if blocks.keys > _LEAST_KEYS:
                blocks = replace(blocks, keys=blocks.keys // 2)
            elif blocks.queries > least:
                blocks = replace(blocks, queries=blocks.queries // 2)
            else:
                break  # it will not be launched: those who ask for this are told when they start
        return blocks


class TritonAttention:
    """The Triton backend. See `AttentionBackend`. Its decodes may be captured in a graph."""

    capturable = True

    def __init__(self, decodes: Tiling | None = None) -> None:
        """With `decodes`, these are cut up so, whatever the model."""
        self._plan = TritonPlan()
        self._decodes = decodes

    def plan(self, batch: AttentionBatch) -> None:
        """See `TritonPlan.take`."""
        self._plan.take(batch)

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        batch, k_cache, v_cache = self._ready(q, k_cache, v_cache)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        options = _options(q, k_cache, batch.page_size, window, softcap)
        if batch.decodes:
            self._decode(batch, q, k_cache, v_cache, out, sinks, scale, options)
        if batch.decodes < batch.rows:
            self._extend(batch, q, k_cache, v_cache, out, sinks, scale, options)
        return out

    def attend_new(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        new: NewTokens,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `RotatingBackend.attend_new`."""
        batch, k_cache, v_cache = self._ready(q, k_cache, v_cache)
        if batch.decodes < batch.rows:
            raise ValueError("a row of more than one new token: only decodes are rotated as they attend")
        require_whole_heads(new.table, q, new.k, new.v)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        options = _options(q, k_cache, batch.page_size, window, softcap)
        self._decode(batch, q, k_cache, v_cache, out, sinks, scale, options, new)
        return out

    def _ready(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> tuple[AttentionBatch, torch.Tensor, torch.Tensor]:
        """The planned batch, and the caches as kernels read them."""
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
        sizes = (batch.page_table.stride(0), splits.of_row)
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
            SEVERAL=splits.several,
            BLOCK_M=blocks.queries,
            BLOCK_N=blocks.keys,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
            maxnreg=blocks.registers if splits.listed is not None else None,
            **early_start(q.device),
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
            **early_start(q.device),
        )


def _options(
    q: torch.Tensor, k_cache: torch.Tensor, page_size: int, window: int, softcap: float
) -> dict[str, int | float]:
    """The constants of decodes and extends."""
    return {
        "GROUP": q.shape[1] // k_cache.shape[2],
        "HEAD_DIM": q.shape[2],
        "PAGE_SIZE": page_size,
        "WINDOW": window,
        "SOFTCAP": softcap,
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
    """Tensors and numbers of `rope_decode_kernel`: `tensors` and `sizes` are what `decode_kernel` is given, too."""
    q_weight, k_weight = new.norms or (None, None)
    strides, inverses = (q.stride(0), new.k.stride(0), new.v.stride(0)), (1 / new.scales[0], 1 / new.scales[1])
    tables = (new.positions, slots, new.table, q_weight, k_weight)
    return (q, new.k, new.v, *tensors, *tables), (*strides, *sizes, new.eps, *inverses, scale)
