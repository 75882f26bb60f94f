"""Ranks as threads of one process: `Collectives` for tests, without processes or sockets."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError
from typing import TypeVar

import torch

from tercet.scheduler.models.layers.shard import Shard

_Given = TypeVar("_Given")


class ThreadCollectives:
    """Collectives of one rank. Raises RuntimeError unless all ranks make the same call with tensors of equal shape."""

    def __init__(self, rank: int, barrier: Barrier, board: list[tuple[str, torch.Tensor]]) -> None:
        self._rank = rank
        self._barrier = barrier
        self._board = board

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self._meet("all_reduce", x)
        total = first.clone()
        for other in others:
            total += other
        return self._part(total)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._part(torch.cat(self._meet("all_gather", x), 1))

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return self._part(self._meet("broadcast", x)[0].clone())

    def all_reduce_min(self, number: int) -> int:
        """See `Collectives`."""
        return min(int(other) for other in self._part(self._meet("smallest", torch.tensor(number))))

    def _meet(self, name: str, x: torch.Tensor) -> list[torch.Tensor]:
        """Exchange values with all ranks. None is overwritten before `_part`."""
        self._board[self._rank] = name, x
        self._barrier.wait()
        names, tensors = zip(*self._board, strict=True)
        if len(set(names)) > 1 or len({(given.shape, given.dtype) for given in tensors}) > 1:
            self._barrier.abort()
            raise RuntimeError(f"ranks do not do the same: {names}, {[given.shape for given in tensors]}")
        return list(tensors)

    def _part(self, result: _Given) -> _Given:
        self._barrier.wait()
        return result


def on_ranks(size: int, run: Callable[[Shard], _Given]) -> list[_Given]:
    """Return the result of `run` on each rank. Raises the first failing rank's exception, which ends the others."""
    barrier = Barrier(size)
    board = [("", torch.empty(0))] * size

    def one(rank: int) -> _Given:
        try:
            return run(Shard(rank, size, ThreadCollectives(rank, barrier, board)))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size, thread_name_prefix="rank") as threads:
        futures = [threads.submit(one, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
