"""Pinned memory of the host, which a GPU reads and writes while the host goes on; where there is none, other memory.

Nothing but waiting depends on which it is. A copy to a GPU with `non_blocking` has read other memory when it returns,
which may be written again at once; one from a GPU returns only when all is there. The driver may wait for what runs
before it copies: https://docs.nvidia.com/cuda/cuda-runtime-api/api-sync-behavior.html
"""

import logging
from collections.abc import Sequence
from functools import cache

import torch

logger = logging.getLogger(__name__)


def pinned_empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor on the host, whose contents will be copied to a device or come from there."""
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")
    except RuntimeError as error:
        if not _is_lack(error):
            raise
    _tell()
    return torch.empty(shape, dtype=dtype)


def pinned(content: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Content of the host that will be copied to a device: the tensor itself, or a copy."""
    if device.type != "cuda":
        return content
    try:
        return content.pin_memory()
    except RuntimeError as error:
        if not _is_lack(error):
            raise
    _tell()
    return content


def _is_lack(error: RuntimeError) -> bool:
    """A device that has failed raises errors of the same types, and says something else.

    Memory is asked for every time: of what torch keeps some may be free again.
    """
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


@cache
def _tell() -> None:
    """Once, for there may be none for any step."""
    logger.warning("the system gives no pinned memory: what is copied to and from the GPU may have to be waited for")
