"""Smoke test of Triton on a GPU: it needs a C compiler, Python's headers and a writable cache folder."""

import sysconfig
from pathlib import Path
from subprocess import CalledProcessError

import torch
from triton import knobs

from tercet.kernels.triton.embedding import embedding


def fault(device: torch.device) -> str:
    """Compile and run a small kernel; return the problem and its remedy in one line, or an empty string.

    Raises torch.AcceleratorError if the device fails, and RuntimeError if it is out of memory.
    """
    try:
        last = _look_up(device)
    except Exception as error:
        if isinstance(error, torch.AcceleratorError) or "out of memory" in str(error):
            raise
        return f"Triton cannot be used: {explain(error)}"
    return "" if last == 3 else f"Triton cannot be used: its first kernel gave {last}, not 3"


def explain(error: Exception) -> str:
    """Return the remedy of an error. Triton wraps none of the errors that it meets while it compiles a kernel."""
    said = str(error).strip().partition("\n")[0]
    place = str(knobs.cache.dir)
    folder = f"the folder of its kernels ({place}; another is named in TRITON_CACHE_DIR)"
    if "C compiler" in said:
        return "it finds no C compiler: install gcc, or name one in CC"
    if isinstance(error, CalledProcessError):
        headers = Path(sysconfig.get_paths()["include"])
        if not (headers / "Python.h").is_file():
            return f"there is no Python.h in {headers}: install Python's headers (on Debian and Ubuntu: python3-dev)"
        return f"{error.cmd[0]} failed, and said above why"
    if isinstance(error, AssertionError) and "libcuda" in said:
        return "it finds no libcuda.so.1: run ldconfig, or name its folder in TRITON_LIBCUDA_PATH"
    if isinstance(error, ImportError):
        return f"{folder} may allow nothing to be run from it: {said}"
    name = str(error.filename) if isinstance(error, OSError) else ""
    if name and (place.startswith(name) or name.startswith(place)):
        return f"{folder} cannot be written: {said}"
    if isinstance(error, FileNotFoundError):  # a compiler in CC, or ldconfig, which locates libraries
        return f"it needs {name}, which is not there"
    return f"{type(error).__name__}: {said}"


def _look_up(device: torch.device) -> float:
    """Look up the last of four rows with a kernel; errors of Triton and the device pass through."""
    table = torch.arange(4.0, device=device)[:, None]
    return embedding(torch.tensor([3], device=device), table).item()
