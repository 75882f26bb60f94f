"""What the processes of a model do together: by NCCL on GPUs, on a CPU by memory that they share, or else by Gloo.

NCCL and Gloo are torch.distributed's. Processes meet by a file, and sockets are of loopback alone: nothing here can be
reached from another machine. The process group is an object that belongs to its model; torch's own, which would be
global, is never made.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions, FileStore
from torch.distributed import ProcessGroupGloo, ReduceOp

from tercet.kernels.native.library import missing_library
from tercet.scheduler.executor.ranks.shared_memory import SharedMemoryCollectives
from tercet.scheduler.models.layers.shard import Collectives

PATIENCE = timedelta(hours=1)
"""How long one waits for another: loading takes minutes. Who dies meanwhile is noticed by other means."""
_LOOPBACK = "127.0.0.1"


class _Work(Protocol):
    def wait(self) -> bool: ...


class _Backend(Protocol):
    """What is used of torch's backends, whose types do not say that they have it."""

    def allreduce(self, tensors: list[torch.Tensor], opts: AllreduceOptions) -> _Work | None: ...

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, opts: AllgatherOptions) -> _Work | None: ...

    def broadcast(self, tensors: list[torch.Tensor], opts: BroadcastOptions) -> _Work | None: ...


def collectives_of(rank: int, size: int, directory: Path, device: torch.device) -> Collectives:
    """The fastest of rank `rank` of `size`, who have all named the same directory when this returns."""
    if device.type == "cpu" and not missing_library():
        return SharedMemoryCollectives(rank, size, directory)
    return TorchCollectives(rank, size, directory, device)


class TorchCollectives:
    """The `Collectives` of rank `rank` of `size`, of tensors on one device.

    On a GPU nothing but `smallest` waits for it, and all but that can be recorded in a CUDA graph. On a CPU a sum of
    16-bit floats is one of float32, rounded once: Gloo would round after each process, and is no faster for it.
    """

    def __init__(self, rank: int, size: int, directory: Path, device: torch.device) -> None:
        """Waits for the others, who name the same directory: a new one, in which only this user can write."""
        self._size = size
        self._device = device
        store = FileStore(str(directory / "rendezvous"), size)
        make = _nccl if device.type == "cuda" else _gloo
        self._backend: _Backend = make(store, rank, size)
        self.smallest(0)  # by which all have met: NCCL connects no earlier, and must not while a graph is recorded

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `Collectives`."""
        if self._device.type == "cpu" and x.dtype.is_floating_point and x.dtype.itemsize < 4:
            return self._reduced(x.float(), ReduceOp.SUM).to(x.dtype)
        return self._reduced(x.contiguous(), ReduceOp.SUM)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See `Collectives`."""
        rows, columns = x.shape
        gathered = x.new_empty(self._size * rows, columns)
        _finish(self._backend._allgather_base(gathered, x.contiguous(), _in_order(AllgatherOptions())))
        return gathered.view(self._size, rows, columns).transpose(0, 1).reshape(rows, self._size * columns)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """See `Collectives`."""
        x = x.contiguous()
        _finish(self._backend.broadcast([x], _in_order(BroadcastOptions())))
        return x

    def smallest(self, number: int) -> int:
        """See `Collectives`."""
        return int(self._reduced(torch.tensor([number], dtype=torch.int64, device=self._device), ReduceOp.MIN))

    def _reduced(self, x: torch.Tensor, how: Any) -> torch.Tensor:
        options = _in_order(AllreduceOptions())
        options.reduceOp = how
        _finish(self._backend.allreduce([x], options))
        return x


class Telling:
    """`Collectives` on a CPU that call `advance` when they are done: a shared step has many, also where it is one call.

    Not for a GPU, where they are done when they are asked for only.
    """

    def __init__(self, collectives: Collectives, advance: Callable[[], None]) -> None:
        self._collectives = collectives
        self._advance = advance

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `Collectives`."""
        return self._told(self._collectives.all_reduce(x))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See `Collectives`."""
        return self._told(self._collectives.all_gather(x))

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """See `Collectives`."""
        return self._told(self._collectives.broadcast(x))

    def smallest(self, number: int) -> int:
        """See `Collectives`."""
        return self._collectives.smallest(number)

    def _told(self, x: torch.Tensor) -> torch.Tensor:
        self._advance()
        return x


def _gloo(store: FileStore, rank: int, size: int) -> Any:
    # torch's stub has these names without the underscore, the library with it; and no constructor that takes them.
    group: Any = ProcessGroupGloo
    options = group._Options()
    options._devices = [group.create_device(hostname=_LOOPBACK)]
    options._timeout = PATIENCE
    return group(store, rank, size, options)


def _nccl(store: FileStore, rank: int, size: int) -> Any:
    from torch.distributed import ProcessGroupNCCL  # builds of torch without CUDA have none

    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # where it listens while ranks find each other
    options = ProcessGroupNCCL.Options()
    options._timeout = PATIENCE
    return ProcessGroupNCCL(store, rank, size, options)


def _in_order(options: Any) -> Any:
    """On a GPU: on the current stream, so that nothing has to wait for another."""
    options.asyncOp = False
    return options


def _finish(work: _Work | None) -> None:
    """On a CPU wait for what was begun; on a GPU let the current stream do so."""
    if work is not None:
        work.wait()
