"""What Triton's attention makes of a planned batch once, for all layers."""

import torch

from tercet.kernels.attention.api import AttentionBatch


class TritonPlan:
    """The batch that a backend was planned for, its tiles, and counters of the splits that have ended."""

    def __init__(self) -> None:
        self._batch: AttentionBatch | None = None
        self._tiles: dict[int, torch.Tensor] = {}
        self.ended: torch.Tensor | None = None
        """int32: how many splits of each row and head have ended. Zeros, but while a decode runs."""

    def take(self, batch: AttentionBatch) -> None:
        """Keep the batch: extends are cut into tiles at the first layer, when the heads are known."""
        self._batch = batch
        self._tiles = {}

    @property
    def batch(self) -> AttentionBatch:
        """Raises RuntimeError if there is none yet."""
        if self._batch is None:
            raise RuntimeError("attend was called before plan")
        return self._batch

    def counters(self, count: int, device: torch.device) -> torch.Tensor:
        """`ended`, of so many numbers or more. A graph's backend makes them before it is recorded."""
        if self.ended is None or len(self.ended) < count:
            self.ended = torch.zeros(count, dtype=torch.int32, device=device)
        return self.ended

    def tiles(self, queries: int, device: torch.device) -> torch.Tensor:
        """`cut_tiles` of the batch, on a device."""
        if queries not in self._tiles:
            tiles = cut_tiles(self.batch, queries)
            if device.type == "cuda":
                tiles = tiles.pin_memory()  # or the driver may wait for the steps in flight before it copies them
            self._tiles[queries] = tiles.to(device, non_blocking=True)
        return self._tiles[queries]


def cut_tiles(batch: AttentionBatch, queries: int) -> torch.Tensor:
    """int32 [tiles, 2], the longest rows' last tiles first: they take longest."""
    tiles = []
    for row in range(batch.decodes, batch.rows):
        count, kv_len = batch.host_query_lens[row], batch.host_kv_lens[row]
        tiles += [(kv_len - count + first, row, first) for first in range(0, count, queries)]
    tiles.sort(reverse=True)
    return torch.tensor([(row, first) for _, row, first in tiles], dtype=torch.int32)
