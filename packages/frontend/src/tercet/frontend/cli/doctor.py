"""Report on this machine for a bug report: `tercet doctor`.

Every part of it is found out on its own, so that one that fails costs one line. Keys and tokens are not in it: of an
environment variable that may hold one, only the name is.
"""

import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tercet.protocol.json_files import error_line, one_line

_TIMEOUT = 120.0
"""Seconds for another program; importing torch takes long on a slow disk."""
_LONGEST = 250
_WIDTH = 14
"""Columns of a line's name, as `tercet-kernels describe` has them."""
_GIB = 2**30
_FLAGS = (
    *("avx2", "fma", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve"),
)
"""Processor features that kernels use, as Linux names them."""
_LIBRARIES = (
    *("torch", "transformers", "tokenizers", "safetensors", "llguidance", "huggingface-hub", "msgspec", "pyzmq"),
    *("uvicorn", "uvloop", "xgrammar", "triton"),
)
_SHOWN = "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "LANG"
"""Environment variables whose values are shown; of others of these families only the name is."""
_NAMED = "TERCET_", "HF_", "CUDA_", "TORCH_", "TRITON_", "OMP_", "MKL_"
_COSTS = {
    "tercet-scheduler": "serves no model itself: its frontends need schedulers elsewhere",
    "tercet-detokenizer": "`tercet serve` does not start: its frontends need detokenizers elsewhere",
    "tercet-kernels": "computes no model",
    "xgrammar": "`--grammar-backend xgrammar` is refused; llguidance serves",
    "triton": "a GPU would compute with plain torch, several times slower",
    "flashinfer-python": "Triton's attention serves on a GPU",
}
"""Effects of packages that are not installed."""
_NO_COMPILER = "no native kernels can be built, and no Triton kernels compiled: torch computes, several times slower"

Finding = tuple[str, str]
"""Name and value of a line."""


def report(probes: Mapping[str, Callable[[], Iterator[Finding]]] | None = None) -> Iterator[str]:
    """Yield the lines of the report."""
    for name, probe in (_PROBES if probes is None else probes).items():
        try:
            for label, value in probe():
                yield f"{label:{_WIDTH}} {one_line(value, _LONGEST)}"
        except Exception as error:  # a report on a broken machine must not break
            kind = "" if isinstance(error, RuntimeError) else f"{type(error).__name__}: "
            yield f"{name:{_WIDTH}} unknown: {kind}{error_line(error, _LONGEST)}"


def _versions() -> Iterator[Finding]:
    parts = ("frontend", "scheduler", "detokenizer", "kernels", "protocol")
    found = {part: _version(f"tercet-{part}") for part in parts}
    yield "tercet", ", ".join(f"{part} {number}" for part, number in found.items() if number)
    libraries = {name: _version(name) for name in _LIBRARIES}
    yield "libraries", ", ".join(f"{name} {number}" for name, number in libraries.items() if number)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _system() -> Iterator[Finding]:
    container = ", in a container" if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists() else ""
    libc = " ".join(platform.libc_ver())
    yield "system", f"{platform.system()} {platform.release()} {platform.machine()}, {libc}{container}"
    yield "python", f"{platform.python_implementation()} {platform.python_version()}"


def _processor() -> Iterator[Finding]:
    text = _text("/proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = _text("/sys/fs/cgroup/cpu.max").split()
    limit = f", a quota of {int(quota[0]) / int(quota[1]):.1f}" if quota and quota[0].isdecimal() else ""
    yield "machine", f"{model[1] if model else platform.processor()}, {usable} of {os.cpu_count()} cores{limit}"
    known = set(flags[1].split()) if flags else set()
    yield "cpu flags", " ".join(each for each in _FLAGS if each in known) or "none that kernels use"


def _memory() -> Iterator[Finding]:
    sizes = dict(re.findall(r"^(\w+):\s+(\d+) kB$", _text("/proc/meminfo"), re.MULTILINE))
    total, free = (int(sizes.get(name, 0)) * 1024 / _GIB for name in ("MemTotal", "MemAvailable"))
    limit = _text("/sys/fs/cgroup/memory.max").strip()
    own = f", a limit of {int(limit) / _GIB:.1f}" if limit.isdecimal() else ""
    yield "memory", f"{free:.1f} of {total:.1f} GiB free{own}" if total else "unknown to this system"
    places = {"home": Path.home(), "temporary": Path(tempfile.gettempdir())}
    yield (
        "disk",
        ", ".join(f"{name} {shutil.disk_usage(path).free / _GIB:.1f} GiB free" for name, path in places.items()),
    )


def _limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield "open files", f"{soft}, at most {hard}"


def _compiler() -> Iterator[Finding]:
    found = shutil.which(os.environ.get("CXX", "c++"))
    yield "compiler", _run([found, "--version"]).splitlines()[0] if found else f"none: {_NO_COMPILER}"


def _kernels() -> Iterator[Finding]:
    """Ask the kernels in a process of their own, which may be without torch, or die."""
    if not _version("tercet-kernels"):
        return
    for line in _run([sys.executable, "-m", "tercet.kernels", "describe"]).splitlines():
        yield line[:_WIDTH].strip(), line[_WIDTH:].strip()


def _environment() -> Iterator[Finding]:
    names = sorted(name for name in os.environ if name.startswith(_NAMED) or name in _SHOWN)
    yield (
        "environment",
        ", ".join(f"{name}={os.environ[name]}" if name in _SHOWN else name for name in names) or "plain",
    )


def _missing() -> Iterator[Finding]:
    for package, cost in _COSTS.items():
        if not _version(package):
            yield "not installed", f"{package}: {cost}"


_PROBES: dict[str, Callable[[], Iterator[Finding]]] = {
    "tercet": _versions,
    "system": _system,
    "machine": _processor,
    "memory": _memory,
    "open files": _limits,
    "compiler": _compiler,
    "kernels": _kernels,
    "environment": _environment,
    "not installed": _missing,
}


def _text(path: str) -> str:
    """Return the text of a file of the system; empty without one."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _run(command: list[str]) -> str:
    """Return the output of a program. Raises RuntimeError with the last line of its errors if it fails."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_TIMEOUT,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode or not done.stdout.strip():
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise RuntimeError(f"{Path(command[0]).name} ended with {done.returncode}: {last}")
    return done.stdout
