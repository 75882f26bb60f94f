"""Memory of pools that is returned to the system, and allocated again under the same tensors."""

from collections.abc import Iterable

import torch

from tercet.kernels.memory import discard


def release_tensors(tensors: Iterable[torch.Tensor]) -> None:
    """Return the memory of contiguous tensors that are not views of others. They must not be used until allocated."""
    for tensor in tensors:
        if tensor.device.type == "cpu":
            discard(tensor)  # `memory.zeros` gives storages that cannot be resized
        else:
            tensor.untyped_storage().resize_(0)


def allocate_tensors(tensors: Iterable[torch.Tensor]) -> None:
    """Allocate zeroed memory for released tensors; others stay as they are. On a GPU, the addresses change."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            storage.resize_(tensor.nbytes)
            tensor.zero_()
