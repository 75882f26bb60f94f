"""Plan of a step for Triton attention: splits of decodes, and tiles of extends."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tercet.kernels.attention.api import AttentionBatch
from tercet.kernels.pinned import pinned
from tercet.kernels.triton.attention.paged_attention import merge_kernel
from tercet.kernels.triton.launch import multiprocessors, pdl_options, power_of_two
from tercet.kernels.triton.launch_cache import launch

_SPLIT = 64
"""Smallest number of keys in a split, where rows are too few to fill a GPU."""

_LONG = 2048
"""Smallest number of keys in a split, where rows are many and the longest would finish last."""

_MOST_SPLITS = 64

FEW_SPLITS = 4
"""Largest number of splits that the last of them merges as fast as a separate kernel would."""

_BLOCKS = 64
"""Unit of split lengths, in keys: a multiple of every kernel's block."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Splits:
    """Splits of the decodes of a step, and the buffers of their partial results."""

    splits_per_row: int
    """Splits of each row, or 0 where `split_list` says how many each row has."""
    grid: tuple[int, int]
    """Grid of programs for each block of heads: (splits, rows), or (1, splits in the list)."""
    parts: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    finished: torch.Tensor | None = None
    split_list: torch.Tensor | None = None

    @property
    def multiple(self) -> bool:
        """True if a row may have more than one split."""
        return self.parts is not None

    def tensors(self, out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the arguments of decode kernels from `out_ptr` to `split_list_ptr`."""
        parts, lse = (out, out) if self.parts is None else (self.parts, self.lse)
        return parts, lse, out, self.finished, self.split_list

    def merge(self, out: torch.Tensor, sinks: torch.Tensor | None, warps: int) -> None:
        """Merge partial results into `out` [tokens, heads, dim], unless the last split of each row does so itself."""
        if not self.multiple or self.finished is not None:
            return
        heads, dim = out.shape[1:]
        launch(
            merge_kernel,
            (self.grid[1] * heads,),
            (self.parts, self.lse, sinks, out),
            (heads,),
            HEAD_DIM=dim,
            SPLITS=self.splits_per_row,
            BLOCK_D=max(16, power_of_two(dim)),
            num_warps=warps,
            **pdl_options(out.device),
        )


class TritonPlan:
    """The planned batch of a backend, its tiles, and counters of finished splits."""

    def __init__(self) -> None:
        self._batch: AttentionBatch | None = None
        self._tiles: dict[int, torch.Tensor] = {}
        self._lists: dict[int, torch.Tensor] = {}
        self.finished: torch.Tensor | None = None
        """int32: number of finished splits of each row and head block. Zero except while a decode runs."""

    def set_batch(self, batch: AttentionBatch) -> None:
        """Keep the batch; extends are cut into tiles at the first layer, when the number of heads is known.

        If the number of decodes is unchanged, lists of splits are rewritten in place, because graphs read them.
        """
        if self._batch is not None and self._batch.decodes != batch.decodes:
            self._lists = {}
        self._batch = batch
        self._tiles = {}
        for window, split_list in self._lists.items():
            split_list.copy_(pinned(list_splits(batch, window), split_list.device), non_blocking=True)

    @property
    def batch(self) -> AttentionBatch:
        """The planned batch. Raises RuntimeError before the first plan."""
        if self._batch is None:
            raise RuntimeError("attend was called before plan")
        return self._batch

    def splits(self, out: torch.Tensor, blocks: int, *, window: int = 0) -> Splits:
        """Return the splits of decodes with result `out` [tokens, heads, dim] and `blocks` blocks of heads."""
        batch, device = self.batch, out.device
        rows, heads, dim = batch.decodes, *out.shape[1:]
        longest = min(batch.page_table.shape[1] * batch.page_size, window or 1 << 40)
        each = choose_splits(rows * blocks, longest, multiprocessors(device))
        if each == 1:
            return Splits(splits_per_row=1, grid=(1, rows))
        split_list = None if each else self._device_split_list(window, device)
        places = (rows, heads, each) if split_list is None else (len(split_list), heads)
        return Splits(
            splits_per_row=each,
            grid=(each, rows) if split_list is None else (1, len(split_list)),
            parts=torch.empty(*places, dim, dtype=torch.float32, device=device),
            lse=torch.empty(places, dtype=torch.float32, device=device),
            finished=self._counters(rows * blocks, device) if each <= FEW_SPLITS else None,
            split_list=split_list,
        )

    def _counters(self, count: int, device: torch.device) -> torch.Tensor:
        """Return `finished` with at least `count` elements. The backend of a graph allocates it before capture."""
        if self.finished is None or len(self.finished) < count:
            self.finished = torch.zeros(count, dtype=torch.int32, device=device)
        return self.finished

    def _device_split_list(self, window: int, device: torch.device) -> torch.Tensor:
        """Return `list_splits` of the batch on a device. The backend of a graph allocates it before capture."""
        if window not in self._lists:
            self._lists[window] = pinned(list_splits(self.batch, window), device).to(device, non_blocking=True)
        return self._lists[window]

    def tiles(self, queries: int, device: torch.device) -> torch.Tensor:
        """Return `cut_tiles` of the batch on a device."""
        if queries not in self._tiles:
            self._tiles[queries] = pinned(cut_tiles(self.batch, queries), device).to(device, non_blocking=True)
        return self._tiles[queries]


def list_splits(batch: AttentionBatch, window: int) -> torch.Tensor:
    """Return int32 [decodes * 3 / 2, 4]: (row, split, splits of the row, keys of a split), padded with zeros.

    A split has `_LONG` keys, or more if there would be too many splits; the last of a row has the rest. Splits of a row
    are adjacent, and the longest rows come first, so that the last programs to start are short.
    """
    keys = np.array(batch.host_kv_lens[: batch.decodes], dtype=np.int64)
    if window:
        keys = np.minimum(keys, window)
    spare = -(-len(keys) // 2)
    share = -(-max(_LONG, -(-int(keys.sum()) // spare)) // _BLOCKS) * _BLOCKS
    order = np.argsort(-keys, kind="stable")
    counts = -(-keys[order] // share)
    split = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    split_list: npt.NDArray[np.int32] = np.zeros((len(keys) + spare, 4), dtype=np.int32)
    split_list[: len(split), 0] = np.repeat(order, counts)
    split_list[: len(split), 1] = split
    split_list[: len(split), 2] = np.repeat(counts, counts)
    split_list[: len(split), 3] = share
    return torch.from_numpy(split_list)


def cut_tiles(batch: AttentionBatch, queries: int) -> torch.Tensor:
    """Return int32 [tiles, 2]: (row, first new token); the last tiles of the longest rows, the slowest, come first."""
    tiles = []
    for row in range(batch.decodes, batch.rows):
        count, kv_len = batch.host_query_lens[row], batch.host_kv_lens[row]
        tiles += [(kv_len - count + first, row, first) for first in range(0, count, queries)]
    tiles.sort(reverse=True)
    return torch.tensor([(row, first) for _, row, first in tiles], dtype=torch.int32)


def choose_splits(programs: int, longest: int, processors: int) -> int:
    """Return the splits of each row, a power of two: two programs for each multiprocessor if there are enough keys.

    If the rows alone fill the GPU, it is 1, or 0 if a row may have more than `_LONG` keys.
    """
    wanted = -(-2 * processors // programs)
    if wanted > 1:
        return power_of_two(min(wanted, -(-longest // _SPLIT), _MOST_SPLITS))
    return 1 if longest <= _LONG else 0
