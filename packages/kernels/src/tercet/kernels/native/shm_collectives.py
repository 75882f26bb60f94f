"""Sums and gathers over processes of one machine, through memory that all of them map: see csrc/meeting.h."""

import ctypes
import mmap

import torch

from tercet.kernels.native import abi
from tercet.kernels.native.library import Library

ROOM = 1 << 20
"""Bytes that a process shows the others at once: what is longer goes in pieces. A second-level cache holds it."""


def meeting_bytes(library: Library, size: int, room: int = ROOM) -> int:
    """How much memory `size` processes need to meet."""
    return int(library.functions.meeting_bytes(size, room))


class ShmCollectives:
    """What process `rank` of `size` does with the others. Belongs to one thread, which waits for theirs."""

    def __init__(self, library: Library, rank: int, size: int, memory: mmap.mmap, room: int = ROOM) -> None:
        """`memory` begins as zeros, is of `meeting_bytes`, and is mapped by all. Raises ValueError if it is smaller."""
        if not 0 <= rank < size or room < 64 or room % 64 or len(memory) < meeting_bytes(library, size, room):
            raise ValueError(f"process {rank} of {size} cannot meet others in {len(memory)} bytes")
        self._functions = library.functions
        self._size = size
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping while the struct points there
        self._struct = abi.ShmCollectives(rank, size, room, self._memory.data_ptr(), 0)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Every process's x, float32 or bfloat16 of any shape, added up; written over x where that is contiguous."""
        x = x.contiguous()
        self._functions.sum_over_ranks(ctypes.byref(self._struct), x.data_ptr(), x.numel(), abi.FORMATS[x.dtype])
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every process's x, of any shape and dtype, in the order of ranks: [size, *x.shape]."""
        x = x.contiguous()
        out = x.new_empty(self._size, *x.shape)
        self._functions.gather_from_ranks(ctypes.byref(self._struct), x.data_ptr(), x.nbytes, out.data_ptr())
        return out
