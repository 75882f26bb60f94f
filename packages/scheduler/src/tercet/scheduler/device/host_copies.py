"""Copies of results from a device to the host."""

from collections.abc import Sequence
from functools import cache

import torch

from tercet.kernels.pinned import pinned_empty


def start_copies(
    tensors: Sequence[torch.Tensor], device: torch.device
) -> tuple[list[torch.Tensor], torch.Event | None]:
    """Start copies to the host. Return the host tensors and an event of their completion (None on a CPU).

    The copies have a stream of their own, which waits for this step only, so the next step neither delays nor waits for
    them.
    """
    if device.type != "cuda":
        return [*tensors], None
    stream = _copy_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        hosts = [pinned_empty(tensor.shape, tensor.dtype, device) for tensor in tensors]
        copies = [host.copy_(tensor, non_blocking=True) for host, tensor in zip(hosts, tensors, strict=True)]
        copied = torch.Event(device=device)
        copied.record()
    for tensor in tensors:
        tensor.record_stream(stream)  # the allocator must not reuse the memory before it is read
    return copies, copied


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
