"""Build hook: compiles csrc/ into one shared library for each instruction set that the compiler knows.

Every library holds the same functions; `tercet.kernels.native.library` loads the best one that the processor runs.
Where there is no compiler the package installs without them, and says so.
"""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIBRARIES = "src/tercet/kernels/native/lib"

_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_AVX512 = [*_AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vnni"))]
_AVX512_BF16 = [*_AVX512, "-mavx512bf16"]
_AMX = [*_AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"]
LEVELS: dict[str, list[str]] = {
    "portable": [],
    "avx2": _AVX2,
    "avx_vnni": [*_AVX2, "-mavxvnni"],
    "avx512": _AVX512,
    "avx512_bf16": _AVX512_BF16,
    "amx": _AMX,
}
"""Instruction sets, each with its compiler flags; beyond the first they are those of x86-64."""

FLAGS = [
    *["-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-fno-math-errno"],
    *["-fno-trapping-math", "-ffp-contract=fast", "-Wall", "-Wextra", "-Wno-psabi"],
]


class NativeBuildHook(BuildHookInterface[Any]):
    """Runs before a wheel or an editable install is made."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Compile, and mark the wheel as one for this platform if anything was compiled."""
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        built = build(root / "csrc", root / LIBRARIES, self.app.display_warning, levels_here())
        if built:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
            build_data["artifacts"] += [str(path.relative_to(root)) for path in built]


def levels_here() -> Mapping[str, Sequence[str]]:
    """Return the instruction sets of processors like this one, each with its compiler flags."""
    x86 = platform.machine().lower() in {"x86_64", "amd64"}
    return LEVELS if x86 else {"portable": LEVELS["portable"]}


def build(
    sources: Path, target: Path, warn: Callable[[str], object], levels: Mapping[str, Sequence[str]]
) -> list[Path]:
    """Compile every instruction set into `target`; returns the libraries. One that cannot be compiled is left out."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None or sys.platform == "win32":
        warn("no C++ compiler: tercet-kernels is installed without its native library, and runs on torch alone")
        return []
    target.mkdir(parents=True, exist_ok=True)
    running = {}
    for level, flags in levels.items():
        library = target / f"libtercet_{level}.so"
        command = [compiler, *FLAGS, *flags, *map(str, sorted(sources.glob("*.cpp")))]
        partial = library.with_suffix(f".{os.getpid()}")
        process = subprocess.Popen([*command, "-o", str(partial)], stderr=subprocess.PIPE, text=True)
        running[library] = partial, process
    built = []
    for library, (partial, process) in running.items():
        _, errors = process.communicate()
        if process.returncode:
            warn(f"{library.name} is left out: the compiler says\n{errors}")
        else:
            partial.replace(library)  # a process that has the old one mapped keeps it
            built.append(library)
    return built


def main(arguments: list[str]) -> int:
    """`python hatch_build.py [FOLDER [COMPILER FLAG ...]]` builds there, by default where the package looks."""
    here = Path(__file__).parent
    target = Path(arguments[0]) if arguments else here / LIBRARIES
    levels = {level: [*flags, *arguments[1:]] for level, flags in levels_here().items()}
    return 0 if build(here / "csrc", target, lambda text: sys.stderr.write(f"{text}\n"), levels) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
