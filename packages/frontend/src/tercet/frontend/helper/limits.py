"""Limits that a helper process sets for itself.

Work that takes too much processor time is ended by the kernel (SIGPROF), work that takes too much memory fails or
aborts.
"""

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FIRST_OTHER_FD = 3
"""First file descriptor after the standard ones."""


def detach() -> None:
    """Ignore Ctrl-C in a terminal, which the frontend handles, and close all descriptors but the standard ones.

    uvloop passes on the frontend's listening sockets.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.closerange(_FIRST_OTHER_FD, os.sysconf("SC_OPEN_MAX"))


@contextmanager
def processor_time(seconds: float) -> Iterator[None]:
    """End the process if the block takes more processor time."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


def limit_memory(more: int) -> None:
    """Limit the address space to `more` bytes beyond its current size, where the system reports that."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        limit = int(statm.read_text().split()[0]) * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def unlimit_memory() -> None:
    """Remove the limit of `limit_memory`."""
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
