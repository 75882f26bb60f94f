"""Loader of the native library: selects the build for the best instruction set of this processor."""

import ctypes
import logging
import math
import os
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tercet.kernels.errors import UnavailableBackendError
from tercet.kernels.native.abi import declare

logger = logging.getLogger(__name__)

LEVELS = ("portable", "avx2", "avx_vnni", "avx512", "avx512_bf16", "amx")
"""Instruction sets, better ones later."""

FOLDER = Path(__file__).parent / "lib"

CGROUP = Path("/sys/fs/cgroup")


class Library:
    """A loaded build. `functions` has the functions of csrc/api.cpp, without their prefix."""

    def __init__(self, level: str, folder: Path = FOLDER) -> None:
        """Raise UnavailableBackendError if the build is missing, does not load, or does not run on this processor."""
        *_, best = usable = usable_levels(folder)
        if level not in usable:
            raise UnavailableBackendError(f"this processor has {best} at best, not {level}")
        self.functions = _open(level, folder)
        self.level = level
        self.best = best
        self.set_threads(available_cores())

    def set_threads(self, count: int) -> None:
        """Set the number of threads of its loops, including the calling thread."""
        self.functions.set_threads(count)

    @property
    def threads(self) -> int:
        """Number of threads: see `set_threads`."""
        return int(self.functions.threads())


def usable_levels(folder: Path = FOLDER) -> list[str]:
    """Return the instruction sets of this processor and operating system, built or not, the best one last."""
    levels = int(_open("portable", folder).levels())
    return [level for number, level in enumerate(LEVELS) if levels >> number & 1]


def _open(level: str, folder: Path) -> Any:
    path = folder / f"libtercet_{level}.so"
    if not path.is_file():
        raise UnavailableBackendError(f"{path.name} was not built: there was no C++ compiler for it, GCC 11 or Clang")
    try:
        return SimpleNamespace(**declare(ctypes.CDLL(str(path))))
    except (OSError, AttributeError) as error:
        raise UnavailableBackendError(f"{path.name} does not load: {error}") from error


@cache
def load_library(level: str | None = None, folder: Path = FOLDER) -> Library:
    """Return the library for an instruction set, by default the best one that was built and runs here.

    Raises UnavailableBackendError without one.
    """
    if level is not None:
        return Library(level, folder)
    built = [candidate for candidate in usable_levels(folder) if (folder / f"libtercet_{candidate}.so").is_file()]
    logger.info("native kernels for %s", built[-1])
    return Library(built[-1], folder)


def describe_library(library: Library) -> str:
    """Return which build is loaded, and why."""
    best, here = library.best, "the best this processor has"
    why = here if best == library.level else f"this processor has {best}, which was not built"
    return f"{library.level} ({why}), {library.threads} threads"


@cache
def missing_library() -> str:
    """Return why there is no native library here; empty if there is one. Logs the reason the first time."""
    try:
        load_library()
    except UnavailableBackendError as error:
        logger.warning("plain torch takes the place of native kernels: %s", error)
        return str(error)
    return ""


def available_cores(cgroup: Path = CGROUP) -> int:
    """Return the number of usable cores: affinity, bounded by the container's CPU quota and OMP_NUM_THREADS."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(allowed, _quota(cgroup), _wanted())))


def _wanted() -> float:
    """Return OMP_NUM_THREADS (its value for the outermost loop), or infinity if it is not set."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(wanted) if wanted.isdecimal() and int(wanted) > 0 else math.inf


def _quota(cgroup: Path) -> float:
    """Return the container's CPU quota in cores, or infinity without one."""
    try:
        quota, period = (cgroup / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):  # no limit, or cgroup version 1
        try:
            names = ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")
            quota, period = ((cgroup / name).read_text(encoding="ascii").strip() for name in names)
        except OSError:
            return math.inf
    return math.inf if quota in {"max", "-1"} else int(quota) / int(period)
