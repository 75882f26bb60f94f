"""Compilation of every kernel, as it would be launched, for GPUs that are absent: `tercet-kernels compile`.

Each case calls an operation with the sizes of a server, on tensors in host memory. A stub driver reports the GPU's
architecture, and Triton's own hook intercepts each launch.
"""

import contextlib
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source
from triton.runtime import driver

from tercet.kernels.tools.launch_specs import CASES
from tercet.kernels.triton.launch import shared_memory_of
from tercet.kernels.triton.precompile import CompileTarget

_SIZED = 4
"""Form of an attribute whose content follows, after its size."""
_FRAME, _REGISTERS = 0x11, 0x2F
"""Attributes of a kernel: bytes of its stack, and registers of a thread."""


@dataclass(frozen=True)
class Compiled:
    """Compiled kernel of a case: bytes of machine code and of shared memory, its PTX, and the machine code."""

    case: str
    kernel: str
    architecture: int
    cubin: int
    shared: int
    ptx: str = ""
    machine_code: bytes = b""

    @property
    def trouble(self) -> str:
        """Reason why it cannot be launched; empty if it can."""
        if not self.cubin:
            return "no machine code"
        room = shared_memory_of(self.architecture)
        return f"{self.shared} bytes of shared memory, of {room}" if self.shared > room else ""


@dataclass(frozen=True)
class Resources:
    """Resources of machine code: registers of a thread, bytes of its stack, where it spills, and instructions."""

    registers: int
    spilled: int
    instructions: int


def resources_of(machine_code: bytes) -> Resources:
    """Return the resources of a cubin with one kernel, from its ELF sections, as `cuobjdump -res-usage` does.

    Instructions take 16 bytes, and are padded to a multiple of 128 bytes.
    """
    sections = dict(_sections(machine_code))
    attributes = _attributes(sections[".nv.info"])
    code = sum(len(content) for name, content in sections.items() if name.startswith(".text."))
    return Resources(attributes[_REGISTERS], attributes[_FRAME], code // 16)


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the names and contents of the sections of a 64-bit ELF file."""
    (start,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<3H", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, start + number * size) for number in range(count)]
    for name, _, _, _, at, length in headers:
        first = headers[names][4] + name
        yield elf[first : elf.index(b"\0", first)].decode(), elf[at : at + length]


def _attributes(info: bytes) -> dict[int, int]:
    """Return the attributes of `.nv.info` that have a number for one symbol, by their code."""
    found, at = {}, 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        size = size if form == _SIZED else 0
        if size == 8:
            found[attribute] = struct.unpack_from("<II", info, at + 4)[1]
        at += 4 + size
    return found


def compile_case(name: str, architecture: int) -> list[Compiled]:
    """Compile every kernel that a case launches.

    Raises the compiler's errors, and UnavailableBackendError for a case that is never launched on such a GPU.
    """
    target = GPUTarget("cuda", architecture, 32)
    results = []

    def take(fn: Any, compile: dict[str, Any], **_: object) -> bool:  # noqa: A002
        source = ASTSource(fn.jit_function, compile["signature"], compile["constants"], compile["configs"][0])
        options = {name: compile[name] for name in ("num_warps", "num_stages")}
        kernel = compile_source(source, target=target, options=options)
        shared = int(kernel.metadata.shared)
        code, ptx = kernel.asm["cubin"], kernel.asm["ptx"]
        results.append(Compiled(name, fn.name, architecture, len(code), shared, ptx, code))
        return True

    with _launches_go_to(take, CompileTarget(target)), torch.inference_mode():
        CASES[name]()
    return results


@contextlib.contextmanager
def _launches_go_to(take: Callable[..., bool], device: CompileTarget) -> Iterator[None]:
    if knobs.runtime.interpret:
        raise RuntimeError("kernels are compiled only without TRITON_INTERPRET")
    before = driver._active  # there may be none, and the public getter would fail
    driver.set_active(device)
    knobs.runtime.jit_cache_hook = take
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = None
        driver._active = before
