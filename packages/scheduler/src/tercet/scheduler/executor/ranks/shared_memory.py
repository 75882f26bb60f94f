"""Collectives of processes on one CPU machine, through shared memory."""

import mmap
import os
import time
from pathlib import Path

import torch

from tercet.kernels.native.library import load_library
from tercet.kernels.native.shm_collectives import ShmCollectives, shm_bytes

_PAUSE = 0.01
"""Seconds between checks for the link that rank 0 makes."""


class SharedMemoryCollectives:
    """The `Collectives` of rank `rank` of `size`, by native kernels. Sums are in float32, rounded once."""

    def __init__(self, rank: int, size: int, directory: Path) -> None:
        """Wait for the other ranks, which name the same new directory, writable by this user only.

        The directory has a link to rank 0's anonymous memory (memfd), which no file system holds.
        """
        library, link = load_library(), directory / "memory"
        if rank == 0:
            descriptor = os.memfd_create("tercet-ranks")
            os.ftruncate(descriptor, shm_bytes(library, size))
            link.symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
        else:
            descriptor = _open_link(link)
        self._shm = ShmCollectives(library, rank, size, mmap.mmap(descriptor, 0))
        self.all_reduce_min(0)  # all ranks have opened the memory after this
        os.close(descriptor)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `Collectives`."""
        if x.dtype == torch.float16:
            return self._shm.sum(x.float()).half()
        return self._shm.sum(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See `Collectives`."""
        return self._shm.gather(x).transpose(0, 1).reshape(len(x), -1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """See `Collectives`."""
        return self._shm.gather(x)[0]

    def all_reduce_min(self, number: int) -> int:
        """See `Collectives`."""
        return int(self._shm.gather(torch.tensor(number)).min())


def _open_link(link: Path) -> int:
    """Open the target of a link, once it exists."""
    while True:
        try:
            return os.open(link, os.O_RDWR)
        except FileNotFoundError:
            time.sleep(_PAUSE)
