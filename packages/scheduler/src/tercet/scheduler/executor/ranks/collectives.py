"""Collectives of the ranks of a model: NCCL on GPUs; shared memory, or else Gloo, on a CPU.

NCCL and Gloo are torch.distributed's. Ranks rendezvous by a file, and sockets are bound to loopback only, so no other
machine can reach them. The process group is an object that belongs to its model; torch's global default group is never
created.
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

TIMEOUT = timedelta(hours=1)
"""Timeout of a collective: loading takes minutes. Deaths of ranks are detected by other means."""
_LOOPBACK = "127.0.0.1"


class _Work(Protocol):
    def wait(self) -> bool: ...


class _Backend(Protocol):
    """The methods used of torch's backends, which their type stubs lack."""

    def allreduce(self, tensors: list[torch.Tensor], opts: AllreduceOptions) -> _Work | None: ...

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, opts: AllgatherOptions) -> _Work | None: ...

    def broadcast(self, tensors: list[torch.Tensor], opts: BroadcastOptions) -> _Work | None: ...


def collectives_of(rank: int, size: int, directory: Path, device: torch.device) -> Collectives:
    """Create the fastest collectives of rank `rank` of `size`; return once all ranks have joined in the directory."""
    if device.type == "cpu" and not missing_library():
        return SharedMemoryCollectives(rank, size, directory)
    return TorchCollectives(rank, size, directory, device)


class TorchCollectives:
    """The `Collectives` of rank `rank` of `size`, for tensors on one device.

    On a GPU only `all_reduce_min` waits for the device, and all others can be captured in a CUDA graph. On a CPU a sum
    of 16-bit floats is computed in float32 and rounded once: Gloo would round after each rank, and is no faster for it.
    """

    def __init__(self, rank: int, size: int, directory: Path, device: torch.device) -> None:
        """Wait for the other ranks, which name the same new directory, writable by this user only."""
        self._size = size
        self._device = device
        store = FileStore(str(directory / "rendezvous"), size)
        make = _nccl if device.type == "cuda" else _gloo
        self._backend: _Backend = make(store, rank, size)
        self.all_reduce_min(
            0
        )  # connects all ranks: NCCL connects on first use, which must not happen during a graph capture

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

    def all_reduce_min(self, number: int) -> int:
        """See `Collectives`."""
        return int(self._reduced(torch.tensor([number], dtype=torch.int64, device=self._device), ReduceOp.MIN))

    def _reduced(self, x: torch.Tensor, how: Any) -> torch.Tensor:
        options = _in_order(AllreduceOptions())
        options.reduceOp = how
        _finish(self._backend.allreduce([x], options))
        return x


class ProgressCollectives:
    """`Collectives` on a CPU that call `advance` after each operation, so that a long step shows progress.

    This is not for a GPU, where operations return before they are done.
    """

    def __init__(self, collectives: Collectives, advance: Callable[[], None]) -> None:
        self._collectives = collectives
        self._advance = advance

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `Collectives`."""
        return self._reported(self._collectives.all_reduce(x))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See `Collectives`."""
        return self._reported(self._collectives.all_gather(x))

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """See `Collectives`."""
        return self._reported(self._collectives.broadcast(x))

    def all_reduce_min(self, number: int) -> int:
        """See `Collectives`."""
        return self._collectives.all_reduce_min(number)

    def _reported(self, x: torch.Tensor) -> torch.Tensor:
        self._advance()
        return x


def _gloo(store: FileStore, rank: int, size: int) -> Any:
    # torch's stub has these names without the underscore, the library with it; and no constructor that takes them.
    group: Any = ProcessGroupGloo
    options = group._Options()
    options._devices = [group.create_device(hostname=_LOOPBACK)]
    options._timeout = TIMEOUT
    return group(store, rank, size, options)


def _nccl(store: FileStore, rank: int, size: int) -> Any:
    from torch.distributed import ProcessGroupNCCL  # builds of torch without CUDA lack it

    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # the interface on which NCCL listens for the rendezvous
    options = ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    return ProcessGroupNCCL(store, rank, size, options)


def _in_order(options: Any) -> Any:
    """Make an operation run on the current stream, so that no other stream has to be waited for."""
    options.asyncOp = False
    return options


def _finish(work: _Work | None) -> None:
    """Wait for an operation: the host on a CPU, the current stream on a GPU."""
    if work is not None:
        work.wait()
