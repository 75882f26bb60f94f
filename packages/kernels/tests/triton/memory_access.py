"""How kernels read and write global memory: run by itself, it writes a line of JSON for each instruction that does.

`memory_access.py ARCHITECTURE CASE...`; see `MemoryAccess` for what a line has.
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import tercet.kernels.triton
from tercet.kernels.tools.compiling import Compiled, compile_case

_SOURCES = {path.name: path for path in Path(tercet.kernels.triton.__file__).parent.rglob("*.py")}
"""The kernels' files by name: a path in Triton's cache may be of another checkout."""

_LABEL = re.compile(r"(\$L\w+):")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$L\w+)")
_PLACE = re.compile(r"\.loc\s+(\d+)\s+(\d+)")
_PLAIN = re.compile(r"\b(ld|st)\.global\S*\.[bfsu](\d+)\s")
_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global\s+\[[^]]*\],\s*\[[^]]*\],\s*(\w+)")


@dataclass(frozen=True)
class MemoryAccess:
    """One instruction of one kernel."""

    case: str
    kernel: str
    source: str  # the line of the kernel's source that it was made of
    kind: str  # "ld" and "st", which a thread waits for when it needs them, and "copy" to shared memory, on the side
    size: int  # bytes that a thread moves
    looped: bool


def accesses(kernel: Compiled) -> Iterator[MemoryAccess]:
    """In the order of the kernel's code."""
    lines = kernel.ptx.splitlines()
    loops = list(_loops(lines))
    named = re.findall(r'\.file\s+(\d+)\s+"([^"]+)"', kernel.ptx)
    files = {number: _SOURCES.get(Path(name).name) for number, name in named}
    source = ""
    for place, line in enumerate(lines):
        if found := _PLACE.search(line):
            file = files[found[1]]
            text = file.read_text().splitlines() if file else []
            source = text[int(found[2]) - 1].strip() if 0 < int(found[2]) <= len(text) else ""
        for kind, size in _moved(line):
            looped = any(begin <= place <= end for begin, end in loops)
            yield MemoryAccess(kernel.case, kernel.kernel.rpartition(".")[2], source, kind, size, looped)


def _moved(line: str) -> Iterator[tuple[str, int]]:
    """(kind, bytes) of what an instruction moves, if it does."""
    if found := _PLAIN.search(line):
        vector = re.search(r"\.v(\d)\.", line)
        yield found[1], int(found[2]) // 8 * (int(vector[1]) if vector else 1)
    elif found := _COPY.search(line):
        yield "copy", int(found[1], 0)


def _loops(lines: list[str]) -> Iterator[tuple[int, int]]:
    """First and last line of what is branched back over."""
    labels = {found[1]: place for place, line in enumerate(lines) if (found := _LABEL.match(line.strip()))}
    for place, line in enumerate(lines):
        if (found := _BRANCH.search(line)) and labels.get(found[1], place) < place:
            yield labels[found[1]], place


if __name__ == "__main__":
    for case in sys.argv[2:]:
        for kernel in compile_case(case, int(sys.argv[1])):
            for access in accesses(kernel):
                sys.stdout.write(json.dumps(asdict(access)) + "\n")
