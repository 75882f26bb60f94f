"""Collectives of the ranks of a model: NCCL on GPUs; shared memory, or else Gloo, on a CPU.

NCCL and Gloo are torch.distributed's. Ranks of one machine rendezvous by a file, and sockets are bound to loopback
only, so no other machine can reach them. Ranks of several hosts rendezvous by a store of rank 0's host, and sockets are
bound to the addresses that the hosts use between them. The process group is an object that belongs to its model;
torch's global default group is never created.
"""

import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    FileStore,
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed import ProcessGroupGloo, ReduceOp

from tercet.kernels.native.library import missing_library
from tercet.scheduler.executor.ranks.rendezvous import Rendezvous, interface_of
from tercet.scheduler.executor.ranks.shared_memory import SharedMemoryCollectives
from tercet.scheduler.models.layers.shard import Collectives, Shard, SingleRankCollectives, Split, Stage

_HIDDEN_STATES, _EMBEDDINGS = range(2)
"""Tags of tensors between stages."""
_MOST_SENT = 8
"""Outputs of a stage that may be on their way to the next one."""
TIMEOUT = timedelta(hours=1)
"""Timeout of a collective: loading takes minutes. Deaths of ranks are detected by other means."""


class _Work(Protocol):
    def wait(self) -> bool: ...


class _Backend(Protocol):
    """The methods used of torch's backends, which their type stubs lack."""

    def allreduce(self, tensors: list[torch.Tensor], opts: AllreduceOptions) -> _Work | None: ...

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, opts: AllgatherOptions) -> _Work | None: ...

    def broadcast(self, tensors: list[torch.Tensor], opts: BroadcastOptions) -> _Work | None: ...

    def alltoall_base(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        received: list[int],
        sent: list[int],
        opts: AllToAllOptions,
    ) -> _Work | None: ...

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> _Work: ...

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> _Work: ...


def shard_of(
    rank: int, split: Split, rendezvous: Rendezvous, device: torch.device, advance: Callable[[], None] | None = None
) -> Shard:
    """Return the shard of a rank, with its collectives and links; return once all ranks have joined.

    On a CPU, `advance` is called after each collective of the rank, and after each input from another stage.
    """
    number, shard = split.place_of(rank)
    collectives: Collectives = SingleRankCollectives()
    if split.shards > 1:
        collectives = collectives_of(shard, split.shards, rendezvous.of_stage(number, split.stages), device)
    advance = advance if device.type == "cpu" else None
    if advance is not None:
        collectives = ProgressCollectives(collectives, advance)
    links = None if split.stages == 1 else TorchStageLinks(rank, split, rendezvous, device, advance)
    return Shard(shard, split.shards, collectives, Stage(number, split.stages, links))


def collectives_of(rank: int, size: int, rendezvous: Rendezvous, device: torch.device) -> Collectives:
    """Create the fastest collectives of rank `rank` of `size`; return once all ranks have joined."""
    if device.type == "cpu" and not rendezvous.store and not missing_library():
        return SharedMemoryCollectives(rank, size, Path(rendezvous.directory))
    return TorchCollectives(rank, size, rendezvous, device)


def host_store(address: str, size: int) -> TCPStore:
    """Return the store of `size` ranks of several hosts, which listens at an address of this host alone."""
    listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    port = listener.getsockname()[1]
    return TCPStore(address, port, size, True, TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach())


class TorchCollectives:
    """The `Collectives` of rank `rank` of `size`, for tensors on one device.

    On a GPU only `all_reduce_min` waits for the device, and all others can be captured in a CUDA graph. On a CPU a sum
    of 16-bit floats is computed in float32 and rounded once: Gloo would round after each rank, and is no faster for it.
    """

    def __init__(self, rank: int, size: int, rendezvous: Rendezvous, device: torch.device) -> None:
        """Wait for the other ranks, which name the same store, or a new directory that only this user can write to."""
        self._size = size
        self._device = device
        make = _nccl if device.type == "cuda" else _gloo
        self.backend: _Backend = make(_store(rendezvous, size), rank, size, rendezvous.address)
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
        _finish(self.backend._allgather_base(gathered, x.contiguous(), _in_order(AllgatherOptions())))
        return gathered.view(self._size, rows, columns).transpose(0, 1).reshape(rows, self._size * columns)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """See `Collectives`."""
        x = x.contiguous()
        _finish(self.backend.broadcast([x], _in_order(BroadcastOptions())))
        return x

    def all_reduce_min(self, number: int) -> int:
        """See `Collectives`."""
        return int(self._reduced(torch.tensor([number], dtype=torch.int64, device=self._device), ReduceOp.MIN))

    def all_to_all(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """See `AllToAll`."""
        arrived = rows.new_empty(sum(received), rows.shape[1])
        options = _in_order(AllToAllOptions())
        _finish(self.backend.alltoall_base(arrived, rows.contiguous(), [*received], [*sent], options))
        return arrived

    def _reduced(self, x: torch.Tensor, how: Any) -> torch.Tensor:
        options = _in_order(AllreduceOptions())
        options.reduceOp = how
        _finish(self.backend.allreduce([x], options))
        return x


class TorchStageLinks:
    """The `StageLinks` of a rank: send and recv of NCCL on a GPU, in the order of steps, and of Gloo on a CPU."""

    def __init__(
        self,
        rank: int,
        split: Split,
        rendezvous: Rendezvous,
        device: torch.device,
        advance: Callable[[], None] | None = None,
    ) -> None:
        """Wait for all ranks of all stages; `advance` is called after each input that has arrived."""
        self._world = TorchCollectives(rank, split.ranks, rendezvous.of_world(), device)
        self._before, self._after = rank + split.shards, rank - split.shards  # rank 0 is in the last stage
        self._first = range(split.ranks - split.shards, split.ranks)
        self._advance = advance
        self._sent: deque[tuple[torch.Tensor, _Work]] = deque()
        self.all_reduce_min = self._world.all_reduce_min

    def receive(self, like: torch.Tensor) -> torch.Tensor:
        """See `StageLinks`."""
        x = torch.empty_like(like)
        self._world.backend.recv([x], self._before, _HIDDEN_STATES).wait()
        if self._advance is not None:
            self._advance()
        return x

    def send(self, x: torch.Tensor) -> None:
        """See `StageLinks`. The tensor is kept until it has been sent; a few may be on their way."""
        while len(self._sent) >= _MOST_SENT:
            self._sent.popleft()[1].wait()
        x = x.contiguous()
        self._sent.append((x, self._world.backend.send([x], self._after, _HIDDEN_STATES)))

    def send_to_first(self, x: torch.Tensor) -> None:
        """See `StageLinks`. The ranks of the first stage wait for them, or soon will."""
        x = x.contiguous()
        for work in [self._world.backend.send([x], rank, _EMBEDDINGS) for rank in self._first]:
            _finish(work)

    def receive_from_last(self, like: torch.Tensor) -> torch.Tensor:
        """See `StageLinks`."""
        x = torch.empty_like(like)
        _finish(self._world.backend.recv([x], 0, _EMBEDDINGS))
        return x


class ProgressCollectives:
    """`Collectives` on a CPU that call `advance` after each operation, so that a long step shows progress.

    This is not for a GPU, where operations return before they are done.
    """

    def __init__(self, collectives: Collectives, advance: Callable[[], None]) -> None:
        self.plain = self._collectives = collectives
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


def _store(rendezvous: Rendezvous, size: int) -> Store:
    if not rendezvous.store:
        return FileStore(str(Path(rendezvous.directory) / "rendezvous"), size)
    host, _, port = rendezvous.store.rpartition(":")
    store = TCPStore(host, int(port), size, False, TIMEOUT, wait_for_workers=False)
    return PrefixStore(rendezvous.group, store)


def _gloo(store: Store, rank: int, size: int, address: str) -> Any:
    # torch's stub has these names without the underscore, the library with it; and no constructor that takes them.
    group: Any = ProcessGroupGloo
    options = group._Options()
    options._devices = [group.create_device(hostname=address)]
    options._timeout = TIMEOUT
    return group(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int, address: str) -> Any:
    from torch.distributed import ProcessGroupNCCL  # builds of torch without CUDA lack it

    if interface := interface_of(address):  # on which NCCL listens for the rendezvous; "=": of exactly this name
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
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
