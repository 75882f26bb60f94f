"""Pinned host memory, which a GPU copies asynchronously, with a fallback to pageable memory.

The fallback affects only waiting. A `non_blocking` copy from pageable memory to a GPU has read the memory when it
returns, so the memory may be reused at once; a copy from a GPU returns when all data has arrived. The driver may
synchronize before it copies: https://docs.nvidia.com/cuda/cuda-runtime-api/api-sync-behavior.html
"""

import logging
from collections.abc import Sequence
from functools import cache

import torch

logger = logging.getLogger(__name__)


def pinned_empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an uninitialized host tensor for copies to or from a device."""
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
    _warn_once()
    return torch.empty(shape, dtype=dtype)


def pinned(content: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return host data ready for a copy to a device: the tensor itself, or a pinned copy."""
    if device.type != "cuda":
        return content
    try:
        return content.pin_memory()
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
    _warn_once()
    return content


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether pinned memory ran out, as opposed to a failed device, whose errors have the same types.

    Later calls try again, because memory of torch's caching allocator may have become free.
    """
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


@cache
def _warn_once() -> None:
    """Log the lack of pinned memory once; it may persist for every step."""
    logger.warning("the system gives no pinned memory: what is copied to and from the GPU may have to be waited for")
