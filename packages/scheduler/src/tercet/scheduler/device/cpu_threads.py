"""How many threads torch uses on a CPU, and which cores belong to which of several processes."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from tercet.kernels.native.library import available_cores

_TOPOLOGY = Path("/sys/devices/system/cpu")


def limit_torch(threads: int | None) -> None:
    """As many as are given; else no more than this process has cores for: torch sees no container's quota."""
    torch.set_num_threads(threads or min(torch.get_num_threads(), available_cores()))


def allowed_cores() -> list[int]:
    """Those that this thread may run on, those of a socket side by side; none where the system does not say."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    return sorted(os.sched_getaffinity(0), key=_place)


def core_share(cores: Sequence[int], rank: int, size: int) -> Sequence[int]:
    """Which of the cores are for one of `size` processes: as many as for each other, or all if there are too few."""
    share = len(cores) // size
    return cores[rank * share : (rank + 1) * share] or cores


def bind_to(cores: Sequence[int]) -> None:
    """Keep this thread, and those that it starts from now on, to some cores; so is the memory that they first write."""
    if cores:
        os.sched_setaffinity(0, cores)


def _place(cpu: int) -> tuple[int, int, int]:
    """(socket, core within it, number): threads of one core are neighbours, whatever their numbers are."""
    folder = _TOPOLOGY / f"cpu{cpu}" / "topology"
    try:
        socket, core = (int((folder / name).read_text("ascii")) for name in ("physical_package_id", "core_id"))
    except (OSError, ValueError):
        return 0, 0, cpu
    return socket, core, cpu
