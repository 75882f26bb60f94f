"""What Triton's attention makes of a planned batch: how its decodes are split, and its extends cut into tiles."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tercet.kernels.attention.api import AttentionBatch
from tercet.kernels.pinned import pinned
from tercet.kernels.triton.attention.paged_attention import merge_kernel
from tercet.kernels.triton.launch import early_start, multiprocessors, power_of_two
from tercet.kernels.triton.launch_cache import launch

_SPLIT = 64
"""Keys that are worth a split of their own, where rows are too few to fill a GPU."""

_LONG = 2048
"""Keys that are, where rows are many: the longest would else keep the others waiting."""

_MOST_SPLITS = 64

FEW_SPLITS = 4
"""The most splits that the last of them merges as fast as a kernel of its own would."""

_BLOCKS = 64
"""Keys: a multiple of every kernel's block."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Splits:
    """How the decodes of a step are cut, and where their parts are kept until they are merged."""

    of_row: int
    """Splits of each row, or 0 where a list says how many."""
    grid: tuple[int, int]
    """Of programs for each block of heads: (splits, rows), or (1, splits in the list)."""
    parts: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    ended: torch.Tensor | None = None
    listed: torch.Tensor | None = None

    @property
    def several(self) -> bool:
        """Whether a row may have more than one."""
        return self.parts is not None

    def tensors(self, out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """What a kernel of decodes is given, from `out_ptr` to `listed_ptr`."""
        parts, lse = (out, out) if self.parts is None else (self.parts, self.lse)
        return parts, lse, out, self.ended, self.listed

    def merge(self, out: torch.Tensor, sinks: torch.Tensor | None, warps: int) -> None:
        """Into `out` [tokens, heads, dim], by a kernel of its own where the last split of a row to end does not."""
        if not self.several or self.ended is not None:
            return
        heads, dim = out.shape[1:]
        launch(
            merge_kernel,
            (self.grid[1] * heads,),
            (self.parts, self.lse, sinks, out),
            (heads,),
            HEAD_DIM=dim,
            SPLITS=self.of_row,
            BLOCK_D=max(16, power_of_two(dim)),
            num_warps=warps,
            **early_start(out.device),
        )


class TritonPlan:
    """The batch that a backend was planned for, its tiles, and counters of the splits that have ended."""

    def __init__(self) -> None:
        self._batch: AttentionBatch | None = None
        self._tiles: dict[int, torch.Tensor] = {}
        self._lists: dict[int, torch.Tensor] = {}
        self.ended: torch.Tensor | None = None
        """int32: how many splits of each row and head have ended. Zeros, but while a decode runs."""

    def take(self, batch: AttentionBatch) -> None:
        """Keep the batch: extends are cut into tiles at the first layer, when the heads are known.

        Lists of splits are written anew, in their places, if there are as many decodes as before: a graph reads them.
        """
        if self._batch is not None and self._batch.decodes != batch.decodes:
            self._lists = {}
        self._batch = batch
        self._tiles = {}
        for window, listed in self._lists.items():
            listed.copy_(pinned(list_splits(batch, window), listed.device), non_blocking=True)

    @property
    def batch(self) -> AttentionBatch:
        """Raises RuntimeError if there is none yet."""
        if self._batch is None:
            raise RuntimeError("attend was called before plan")
        return self._batch

    def splits(self, out: torch.Tensor, blocks: int, *, window: int = 0) -> Splits:
        """Of decodes that give `out` [tokens, heads, dim], whose heads are in so many blocks."""
        batch, device = self.batch, out.device
        rows, heads, dim = batch.decodes, *out.shape[1:]
        longest = min(batch.page_table.shape[1] * batch.page_size, window or 1 << 40)
        each = choose_splits(rows * blocks, longest, multiprocessors(device))
        if each == 1:
            return Splits(of_row=1, grid=(1, rows))
        listed = None if each else self._listed(window, device)
        places = (rows, heads, each) if listed is None else (len(listed), heads)
        return Splits(
            of_row=each,
            grid=(each, rows) if listed is None else (1, len(listed)),
            parts=torch.empty(*places, dim, dtype=torch.float32, device=device),
            lse=torch.empty(places, dtype=torch.float32, device=device),
            ended=self._counters(rows * blocks, device) if each <= FEW_SPLITS else None,
            listed=listed,
        )

    def _counters(self, count: int, device: torch.device) -> torch.Tensor:
        """`ended`, of so many numbers or more. A graph's backend makes them before it is recorded."""
        if self.ended is None or len(self.ended) < count:
            self.ended = torch.zeros(count, dtype=torch.int32, device=device)
        return self.ended

    def _listed(self, window: int, device: torch.device) -> torch.Tensor:
        """`list_splits` of the batch, on a device. A graph's backend makes it before it is recorded."""
        if window not in self._lists:
            self._lists[window] = pinned(list_splits(self.batch, window), device).to(device, non_blocking=True)
        return self._lists[window]

    def tiles(self, queries: int, device: torch.device) -> torch.Tensor:
        """`cut_tiles` of the batch, on a device."""
        if queries not in self._tiles:
            self._tiles[queries] = pinned(cut_tiles(self.batch, queries), device).to(device, non_blocking=True)
        return self._tiles[queries]


def list_splits(batch: AttentionBatch, window: int) -> torch.Tensor:
    """int32 [decodes * 3 / 2, 4]: (row, split, splits of that row, keys of each but the last), and then zeros.

    Rows have as many splits as their keys ask for: each of `_LONG`, or of more where there would be more splits than
    that. Those of a row follow each other, and the longest rows come first: who begins last should not take longest.
    """
    keys = np.array(batch.host_kv_lens[: batch.decodes], dtype=np.int64)
    if window:
        keys = np.minimum(keys, window)
    spare = -(-len(keys) // 2)
    share = -(-max(_LONG, -(-int(keys.sum()) // spare)) // _BLOCKS) * _BLOCKS
    order = np.argsort(-keys, kind="stable")
    counts = -(-keys[order] // share)
    split = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    listed: npt.NDArray[np.int32] = np.zeros((len(keys) + spare, 4), dtype=np.int32)
    listed[: len(split), 0] = np.repeat(order, counts)
    listed[: len(split), 1] = split
    listed[: len(split), 2] = np.repeat(counts, counts)
    listed[: len(split), 3] = share
    return torch.from_numpy(listed)


def cut_tiles(batch: AttentionBatch, queries: int) -> torch.Tensor:
    """int32 [tiles, 2], the longest rows' last tiles first: they take longest."""
    tiles = []
    for row in range(batch.decodes, batch.rows):
        count, kv_len = batch.host_query_lens[row], batch.host_kv_lens[row]
        tiles += [(kv_len - count + first, row, first) for first in range(0, count, queries)]
    tiles.sort(reverse=True)
    return torch.tensor([(row, first) for _, row, first in tiles], dtype=torch.int32)


def choose_splits(programs: int, longest: int, processors: int) -> int:
    """Splits of each row, a power of two: two programs for each multiprocessor, if keys allow.

    Where there are as many without splits it is 1, or 0 if a row may have more than `_LONG` keys.
    """
    wanted = -(-2 * processors // programs)
    if wanted > 1:
        return power_of_two(min(wanted, -(-longest // _SPLIT), _MOST_SPLITS))
    return 1 if longest <= _LONG else 0
