"""Compilation of every kernel, as it would be launched, for GPUs that are absent: `tercet-kernels compile`.

Each case calls an operation with the sizes of a server, on tensors in host memory. A stub driver reports the GPU's
architecture, and Triton's own hook intercepts each launch.
"""

import contextlib
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


@dataclass(frozen=True)
class Compiled:
    """Compiled kernel of a case: bytes of machine code and of shared memory, and its PTX."""

    case: str
    kernel: str
    architecture: int
    cubin: int
    shared: int
    ptx: str = ""

    @property
    def trouble(self) -> str:
        """Reason why it cannot be launched; empty if it can."""
        if not self.cubin:
            return "no machine code"
        room = shared_memory_of(self.architecture)
        return f"{self.shared} bytes of shared memory, of {room}" if self.shared > room else ""


class _CompileTarget:
    """Stub driver of an absent GPU."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return self._target.arch  # type: ignore[no-any-return]  # kernels are cached by device: one per architecture

    def get_current_stream(self, device: int) -> int:  # noqa: ARG002
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


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
        results.append(Compiled(name, fn.name, architecture, len(kernel.asm["cubin"]), shared, kernel.asm["ptx"]))
        return True

    with _launches_go_to(take, _CompileTarget(target)), torch.inference_mode():
        CASES[name]()
    return results


@contextlib.contextmanager
def _launches_go_to(take: Callable[..., bool], device: _CompileTarget) -> Iterator[None]:
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
