"""Libraries for instruction sets that this processor lacks, in those that it has: emulated.h says how."""

import fcntl
from functools import cache
from pathlib import Path

import pytest

from packages.kernels.hatch_build import LEVELS as FLAGS
from packages.kernels.hatch_build import build
from tercet.kernels.errors import UnavailableBackendError
from tercet.kernels.native import library
from tercet.kernels.native.library import Library, usable_levels

SOURCES = Path(__file__).parents[1] / "csrc"
HEADER = Path(__file__).parent / "native" / "emulated.h"
BASE = "avx512"
EMULATED = {"avx512_bf16": (), "amx": ("-DEMULATE_AMX",)}
OPTIONS = ["-O1"]  # compiles in a third of the time


@cache
def emulated_library(level: str, folder: Path) -> Library:
    """Raises UnavailableBackendError if this level cannot be emulated here.

    The first caller of all that share a folder, in whatever process, compiles the level into it.
    """
    if level not in EMULATED or BASE not in usable_levels():
        raise UnavailableBackendError(f"{level} is not to be had here")
    build_once(level, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "usable_levels", lambda _: [level])
        return Library(level, folder)


def build_once(level: str, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    flags = [*FLAGS[BASE], *OPTIONS, "-include", str(HEADER), *EMULATED[level]]
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if any(folder.glob(f"*_{level}.so")):
            return
        complaints: list[str] = []
        build(SOURCES, folder, complaints.append, {level: flags})
        if complaints:
            raise UnavailableBackendError("\n".join(complaints))
