"""Latent attention by Tercet's Triton kernels: see `tercet.kernels.triton.attention.latent_attention`."""

from dataclasses import dataclass
from typing import Any

import torch

from tercet.kernels.attention.api import AttentionBatch, AttentionParams
from tercet.kernels.attention.latent import LatentSizes, latent_rank
from tercet.kernels.attention.triton_plan import TritonPlan
from tercet.kernels.triton.attention.latent_attention import latent_decode_kernel, latent_extend_kernel
from tercet.kernels.triton.launch import Tiling, cdiv, pdl_options, power_of_two, shared_memory
from tercet.kernels.triton.launch_cache import launch
from tercet.kernels.triton.linear.fp8 import readable

_ROWS = 16
"""Smallest number of rows in a decode's tile that tensor cores multiply."""

_WIDE_KEYS = 16
"""Smallest number of keys in a float32 block that tensor cores multiply."""

DECODE_TILINGS = (
    Tiling(32, 4, 3),
    Tiling(32, 4, 5),
    Tiling(32, 8, 3),
    Tiling(32, 8, 5),
    Tiling(16, 4, 5),
    Tiling(16, 4, 7),
    Tiling(64, 8, 3),
)
"""Tilings of decodes in 16 bits, by vectors in a block; the first is in use, the others are not measured yet.

Three stages hold one block in shared memory, five hold two, as in `attention.triton`."""

EXTEND_TILINGS = (Tiling(32, 8, 3), Tiling(32, 8, 5), Tiling(64, 8, 3), Tiling(64, 8, 5))
"""Tilings of prompts in 16 bits, by rows of a tile; the first is in use, and only it fits into 99 KiB of shared memory.
"""


@dataclass(frozen=True, kw_only=True)
class _Blocks:
    """Block sizes of a kernel.

    In 2 bytes, 576 elements take less than the 99 KiB of shared memory that every GPU has. In float32 even the smallest
    tiles may not fit: see `missing_memory`.
    """

    rows: int  # of a tile
    heads: int  # of one token in a tile
    keys: int
    warps: int
    stages: int

    @classmethod
    def of_decode(cls, heads: int, itemsize: int, tiling: Tiling) -> "_Blocks":
        """Return the blocks for a decode; `tiling` applies to 16-bit numbers."""
        keys, warps, stages = (_WIDE_KEYS, 4, 2) if itemsize > 2 else (tiling.block, tiling.warps, tiling.stages)
        return cls(rows=_ROWS, heads=_share(heads, _ROWS), keys=keys, warps=warps, stages=stages)

    @classmethod
    def of_extend(cls, queries: int, heads: int, itemsize: int, tiling: Tiling) -> "_Blocks":
        """Return the blocks for extends of at most `queries` tokens; `tiling` applies to 16-bit numbers."""
        most, keys, stages = (_ROWS, _WIDE_KEYS, 2) if itemsize > 2 else (tiling.block, 32, tiling.stages)
        rows = min(most, max(_ROWS, power_of_two(queries * heads)))
        return cls(rows=rows, heads=_share(heads, rows), keys=keys, warps=min(tiling.warps, rows // 4), stages=stages)


class TritonLatent:
    """Triton backend of latent attention. Its decodes may be captured in a graph."""

    capturable = True
    bidirectional = False

    def __init__(self, decodes: Tiling = DECODE_TILINGS[0], extends: Tiling = EXTEND_TILINGS[0]) -> None:
        """Use these tilings for 16-bit numbers."""
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
        """Compute `AttentionBackend.attend`. Raises ValueError for tensors that are not contiguous or do not fit."""
        batch, rank, scale = self._plan.batch, latent_rank(v_cache, params), params.scale * key_scale
        cache = k_cache[:, :, 0]
        if q.stride(2) != 1 or not cache.is_contiguous():
            raise ValueError("triton attention needs contiguous heads and caches")
        width = q.shape[2]
        if cache.shape[1:] != (batch.page_size, width) or not 0 < rank < width:
            raise ValueError(f"queries {list(q.shape)} of rank {rank} do not fit a cache {list(cache.shape)}")
        out = torch.empty(*q.shape[:2], rank, dtype=q.dtype, device=q.device)
        options = {
            "HEADS": q.shape[1],
            "RANK": rank,
            "ROPE": width - rank,
            "PAGE_SIZE": batch.page_size,
            "BLOCK_R": _block(rank),
            "BLOCK_P": _block(width - rank),
            **pdl_options(q.device),
        }
        if batch.decodes:
            self._decode(batch, q, readable(cache), out, scale, options)
        if batch.decodes < batch.rows:
            self._extend(batch, q, readable(cache), out, scale, options)
        return out

    def _decode(
        self,
        batch: AttentionBatch,
        q: torch.Tensor,
        cache: torch.Tensor,
        out: torch.Tensor,
        scale: float,
        options: dict[str, Any],
    ) -> None:
        heads = out.shape[1]
        blocks = _Blocks.of_decode(heads, q.element_size(), self._decodes)
        groups = cdiv(heads, blocks.heads)
        splits = self._plan.splits(out, groups)
        launch(
            latent_decode_kernel,
            (groups, *splits.grid),
            (q, cache, *splits.tensors(out), batch.page_table, batch.kv_lens),
            (q.stride(0), q.stride(1), batch.page_table.stride(0), splits.splits_per_row, scale),
            MULTIPLE_SPLITS=splits.multiple,
            **_cut(blocks),
            **options,
        )
        splits.merge(out, None, warps=8)

    def _extend(
        self,
        batch: AttentionBatch,
        q: torch.Tensor,
        cache: torch.Tensor,
        out: torch.Tensor,
        scale: float,
        options: dict[str, Any],
    ) -> None:
        heads = q.shape[1]
        blocks = _Blocks.of_extend(batch.max_query, heads, q.element_size(), self._extends)
        queries = blocks.rows // blocks.heads
        tiles = self._plan.tiles(queries, q.device)
        launch(
            latent_extend_kernel,
            (tiles.shape[0], cdiv(heads, blocks.heads)),
            (q, cache, out, batch.page_table, batch.kv_lens, batch.query_start, tiles),
            (q.stride(0), q.stride(1), batch.page_table.stride(0), scale),
            **_cut(blocks),
            **options,
        )


def missing_memory(device: torch.device, sizes: LatentSizes) -> str:
    """Return why a device lacks the shared memory for kernels of these sizes; empty if it has enough.

    Float32 kernels keep queries and weights in memory twice, as the parts of their numbers (`tf32x3`), beside a block
    of vectors. In 16 bits every known rank fits on every GPU.
    """
    width = _block(sizes.rank) + _block(sizes.rope)
    needed = 8 * _ROWS * (width + _WIDE_KEYS) + _WIDE_KEYS * width * sizes.cached.itemsize
    room = shared_memory(device)
    if sizes.dtype.itemsize == 2 or needed <= room:
        return ""
    return f"its kernels need {needed} bytes of shared memory for vectors in float32, of {room}"


def _block(size: int) -> int:
    """Return the size of the kernel's block for `size` elements: a power of two."""
    return max(_ROWS, power_of_two(size))


def _share(heads: int, rows: int) -> int:
    """Return the number of heads in each tile if the fewest tiles of `rows` rows share the heads evenly."""
    return -(-heads // -(-heads // rows))


def _cut(blocks: _Blocks) -> dict[str, int]:
    """Return the compile-time constants of the blocks."""
    sizes = {"GROUP": blocks.heads, "BLOCK_M": blocks.rows, "BLOCK_N": blocks.keys}
    return sizes | {"num_warps": blocks.warps, "num_stages": blocks.stages}
