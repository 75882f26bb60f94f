"""Sums and gathers over processes of one machine, through shared memory: see csrc/shm_collectives.h."""

import ctypes
import mmap

import torch

from tercet.kernels.native import abi
from tercet.kernels.native.library import Library

ROOM = 1 << 20
"""Bytes that a process publishes at once; longer data goes in pieces. The size fits into a second-level cache."""


def shm_bytes(library: Library, size: int, room: int = ROOM) -> int:
    """Return the bytes of shared memory that `size` processes need."""
    return int(library.functions.shm_bytes(size, room))


class ShmCollectives:
    """Collective operations of process `rank` of `size`, for one thread, which blocks until the others arrive."""

    def __init__(self, library: Library, rank: int, size: int, memory: mmap.mmap, room: int = ROOM) -> None:
        """Attach to zeroed `memory` of `shm_bytes` that all processes map. Raises ValueError if it is too small."""
        if not 0 <= rank < size or room < 64 or room % 64 or len(memory) < shm_bytes(library, size, room):
            raise ValueError(f"process {rank} of {size} cannot meet others in {len(memory)} bytes")
        self._functions = library.functions
        self._size = size
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping while the struct points there
        self._struct = abi.ShmCollectives(rank, size, room, self._memory.data_ptr(), 0)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of x (float32 or bfloat16, any shape) over all processes; overwrites x if it is contiguous."""
        x = x.contiguous()
        self._functions.sum_over_ranks(ctypes.byref(self._struct), x.data_ptr(), x.numel(), abi.FORMATS[x.dtype])
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return x of all processes (any shape and dtype) in the order of ranks: [size, *x.shape]."""
        x = x.contiguous()
        out = x.new_empty(self._size, *x.shape)
        self._functions.gather_from_ranks(ctypes.byref(self._struct), x.data_ptr(), x.nbytes, out.data_ptr())
        return out
