"""Ranks as threads of one process: `Collectives` and `StageLinks` for tests, without processes or sockets."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, Queue
from threading import Barrier, BrokenBarrierError
from typing import TypeVar

import torch

from tercet.scheduler.models.layers.expert_parallel.tokens import with_attention_ranks, with_experts
from tercet.scheduler.models.layers.shard import Shard, Stage

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

    def all_to_all(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """See `AllToAll`. Raises RuntimeError unless ranks get as many rows as they expect."""
        numbers = self._part(torch.stack(self._meet("all_to_all", torch.tensor(sent))))
        if numbers[:, self._rank].tolist() != [*received] or len(rows) != sum(sent):
            self._barrier.abort()
            raise RuntimeError(f"rank {self._rank} expects {received} of {numbers.tolist()}, and sends {len(rows)}")
        self._board[self._rank] = "rows", rows
        self._barrier.wait()
        parts = [
            torch.split(x, counts.tolist())[self._rank] for (_, x), counts in zip(self._board, numbers, strict=True)
        ]
        return self._part(torch.cat(parts))

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


class ThreadLinks:
    """The `StageLinks` of one rank: queues from the stage before, to the next, and to the ranks of the first one."""

    def __init__(
        self,
        before: "Queue[torch.Tensor]",
        after: "Queue[torch.Tensor]",
        world: ThreadCollectives,
        barrier: Barrier,
        first: "Sequence[Queue[torch.Tensor]]",
        own: "Queue[torch.Tensor]",
    ) -> None:
        self._before = before
        self._after = after
        self._first, self._own = first, own
        self._barrier = barrier
        self.all_reduce_min = world.all_reduce_min

    def receive(self, like: torch.Tensor) -> torch.Tensor:
        """See `StageLinks`. Raises RuntimeError for another shape or dtype, BrokenBarrierError if a rank has failed."""
        return self._next(self._before, like)

    def _next(self, queue: "Queue[torch.Tensor]", like: torch.Tensor) -> torch.Tensor:
        while True:
            try:
                x = queue.get(timeout=0.1)
                break
            except Empty:
                if self._barrier.broken:
                    raise BrokenBarrierError from None
        if (x.shape, x.dtype) != (like.shape, like.dtype):
            raise RuntimeError(f"stages do not run the same step: {x.shape} {x.dtype}, {like.shape} {like.dtype}")
        return x

    def send(self, x: torch.Tensor) -> None:
        """See `StageLinks`."""
        self._after.put(x.clone())

    def send_to_first(self, x: torch.Tensor) -> None:
        """See `StageLinks`."""
        for queue in self._first:
            queue.put(x.clone())

    def receive_from_last(self, like: torch.Tensor) -> torch.Tensor:
        """See `StageLinks`. Raises the errors of `receive`."""
        return self._next(self._own, like)


def on_ranks(
    size: int, run: Callable[[Shard], _Given], *, stages: int = 1, experts: int = 1, attention: bool = False
) -> list[_Given]:
    """Return the result of `run` on each of `size` ranks of each stage, the first stage first.

    Experts are on `experts` groups of the ranks of a stage; with `attention`, each rank has experts, and requests of
    its own.

    Raises the first failing rank's exception, which ends the others.
    """
    world, count = Barrier(size * stages), size * stages
    barriers = [Barrier(size) for _ in range(stages)]
    boards = [[("", torch.empty(0))] * size for _ in range(stages)]
    board = [("", torch.empty(0))] * count
    queues: list[list[Queue[torch.Tensor]]] = [[Queue() for _ in range(size)] for _ in range(stages + 1)]
    first: list[Queue[torch.Tensor]] = [Queue() for _ in range(size)]

    def shard_of(number: int) -> Shard:
        stage, rank = divmod(number, size)
        everyone = ThreadCollectives(number, world, board)
        links = ThreadLinks(queues[stage][rank], queues[stage + 1][rank], everyone, world, first, first[rank])
        own = ThreadCollectives(rank, barriers[stage], boards[stage])
        shard = Shard(rank, size, own, Stage(stage, stages, links if stages > 1 else None))
        return (
            with_attention_ranks(shard, own.all_to_all) if attention else with_experts(shard, experts, own.all_to_all)
        )

    def one(number: int) -> _Given:
        try:
            return run(shard_of(number))
        except BaseException:
            for barrier in (world, *barriers):
                barrier.abort()
            raise

    with ThreadPoolExecutor(count, thread_name_prefix="rank") as threads:
        futures = [threads.submit(one, number) for number in range(count)]
    errors = [error for future in futures if (error := future.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
