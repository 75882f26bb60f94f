"""Large memory of a CPU: zero, on huge pages where the system gives them, and taken only where it is written."""

import contextlib
import ctypes
import math
import mmap
from collections.abc import Sequence

import torch

_HUGE_PAGE = 1 << 21
"""Bytes. Reading on them takes fewer address lookups."""


def zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the CPU. Unlike `torch.zeros` it writes no zeros: the system has them, a page at a time."""
    size = math.prod(shape) * dtype.itemsize
    if size < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(*shape, dtype=dtype)
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        region.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(region, dtype=dtype).view(*shape)


def give_back() -> None:
    """Give freed memory back to the system, which glibc does by itself only from the end of its heap."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
