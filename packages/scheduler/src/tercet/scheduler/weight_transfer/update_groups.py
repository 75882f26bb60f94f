"""Process groups of torch.distributed in which a trainer broadcasts new weights to a scheduler."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from tercet.protocol.messages.weight_transfers import InitWeightsUpdateGroupReq, UpdateWeightsFromDistributedReq

_TIMEOUT = timedelta(seconds=300)
_TRAINER = 0
"""Rank of the sender in every group."""


class TorchUpdateGroups:
    """Groups by name, beside the default group of this process, which may be in use for something else."""

    def __init__(self, peer: str, device: torch.device) -> None:
        self._peer = peer
        self._device = device
        self._groups: dict[str, dist.ProcessGroup] = {}

    def join(self, request: InitWeightsUpdateGroupReq) -> None:
        """Join a group, and wait for all its members. Raises ValueError."""
        if request.group in self._groups:
            raise ValueError(f"group {request.group!r} exists: destroy it first")
        if request.backend == "nccl" and self._device.type != "cuda":
            raise ValueError("backend nccl needs a GPU: use gloo")
        try:
            self._groups[request.group] = _join(request, request.ranks[self._peer])
        except RuntimeError as error:
            raise ValueError(f"group {request.group!r} cannot be joined: {error}") from error

    def leave(self, group: str) -> None:
        """Leave a group. Raises ValueError for one that does not exist."""
        left = self._group(group)
        del self._groups[group]
        try:
            dist.destroy_process_group(left)
        except RuntimeError as error:
            raise ValueError(f"left group {group!r}, but destroying it failed: {error}") from error

    def receive(self, request: UpdateWeightsFromDistributedReq) -> bytes:
        """Return the broadcast tensors as a safetensors file. Raises ValueError."""
        group, tensors = self._group(request.group), {}
        try:
            for name, dtype, shape in zip(request.names, request.dtypes, request.shapes, strict=True):
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
                dist.broadcast(tensor, src=_TRAINER, group=group)
                tensors[name] = tensor.cpu()
        except RuntimeError as error:
            raise ValueError(f"the broadcast in group {request.group!r} failed: {error}") from error
        return save(tensors)

    def _group(self, name: str) -> dist.ProcessGroup:
        group = self._groups.get(name)
        if group is None:
            raise ValueError(f"there is no group {name!r}: call /init_weights_update_group first")
        return group


def _join(request: InitWeightsUpdateGroupReq, rank: int) -> dist.ProcessGroup:
    """Join a group under the same keys of the store as trainers do that form groups for SGLang.

    torch has no public function for a group without a default group.
    """
    store, _, size = next(
        rendezvous(f"tcp://{request.address}:{request.port}", rank, request.world_size, timeout=_TIMEOUT)
    )
    store.set_timeout(_TIMEOUT)
    new_group: Any = c10d._new_process_group_helper
    group, _ = new_group(
        size,
        rank,
        [],
        dist.Backend(request.backend),
        c10d.PrefixStore(request.group, store),
        group_name=request.group,
        timeout=_TIMEOUT,
    )
    assert isinstance(group, dist.ProcessGroup)
    c10d._world.pg_group_ranks[group] = {member: member for member in range(size)}
    return group
