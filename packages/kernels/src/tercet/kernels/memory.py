"""Large zeroed CPU memory on huge pages, where the system has them, allocated only when it is first written."""

import contextlib
import ctypes
import math
import mmap
import os
from collections.abc import Sequence

import torch

_HUGE_PAGE = 1 << 21
"""Bytes. Huge pages need fewer address translations (TLB misses)."""


def zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of zeros on the CPU.

    Unlike `torch.zeros`, it writes nothing: the system zeroes each page at its first access.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(*shape, dtype=dtype)
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # the kernel has no huge pages
        region.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(region, dtype=dtype).view(*shape)


def discard(tensor: torch.Tensor) -> None:
    """Return the memory of a CPU tensor to the system, which gives zeroed memory where the tensor is written again.

    The tensor stays where it is. Parts of pages at its ends keep their values.
    """
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if first >= end:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def give_back() -> None:
    """Return freed memory to the system; glibc itself only trims the end of its heap."""
    with contextlib.suppress(AttributeError, OSError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
