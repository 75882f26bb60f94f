"""Torch's CPU threads, and the division of cores among processes."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from tercet.kernels.native.library import available_cores

_TOPOLOGY = Path("/sys/devices/system/cpu")


def limit_torch_threads(threads: int | None) -> None:
    """Set torch's threads, by default at most this process's cores: torch ignores a container's quota."""
    torch.set_num_threads(threads or min(torch.get_num_threads(), available_cores()))


def allowed_cores() -> list[int]:
    """Return this thread's allowed cores, ordered by socket; empty if the system does not tell."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    return sorted(os.sched_getaffinity(0), key=_place)


def core_share(cores: Sequence[int], rank: int, size: int) -> Sequence[int]:
    """Return the cores of one of `size` processes: equal shares, or all cores if there are too few."""
    share = len(cores) // size
    return cores[rank * share : (rank + 1) * share] or cores


def bind_to_cores(cores: Sequence[int]) -> None:
    """Bind this thread, and threads it starts later, to some cores; memory that they first write is local to these."""
    if cores:
        os.sched_setaffinity(0, cores)


def _place(cpu: int) -> tuple[int, int, int]:
    """Return (socket, core within it, number), which makes threads of one core neighbors."""
    folder = _TOPOLOGY / f"cpu{cpu}" / "topology"
    try:
        socket, core = (int((folder / name).read_text("ascii")) for name in ("physical_package_id", "core_id"))
    except (OSError, ValueError):
        return 0, 0, cpu
    return socket, core, cpu
