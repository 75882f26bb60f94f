"""Compilation of every kernel, as it would be launched, for GPUs that are absent: `tercet-kernels compile`.

Each case calls an operation with the sizes of a server, on tensors in host memory. A stub driver reports the GPU's
architecture, and Triton's own hook intercepts each launch.
"""

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source
from triton.runtime import driver

from tercet.kernels.tools.launch_specs import CASES
from tercet.kernels.triton.launch import shared_memory_of
from tercet.kernels.triton.precompile import CompileTarget


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
    """Resources of machine code: registers of a thread, bytes that it spills to memory, and instructions."""

    registers: int
    spilled: int
    instructions: int


def resources_of(machine_code: bytes) -> Resources:
    """Return the resources of a cubin, by the disassembler that comes with Triton."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(machine_code)
        file.flush()
        usage = subprocess.check_output([tools / "cuobjdump", "-res-usage", file.name], text=True)
        listing = subprocess.check_output([tools / "nvdisasm", "-c", file.name], text=True)
    sizes = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    instructions = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?!NOP|BRA `)", listing, re.MULTILINE)
    return Resources(sizes["REG"], sizes["STACK"] + sizes["LOCAL"], len(instructions))


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
