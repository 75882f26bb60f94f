"""Launches, and what each needs to know: block sizes, how wide the machine is, and what it can overlap."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver

_INTERPRETED = 32
"""Multiprocessors that the interpreter plays."""

_KIBIBYTES = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
SHARED_MEMORY = {architecture: kibibytes << 10 for architecture, kibibytes in _KIBIBYTES.items()}
"""Bytes of shared memory that one program may have, by architecture: for GPUs that are not here.

https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities
"""


@dataclass(frozen=True)
class Tiling:
    """What one program of an operation takes, in the operation's own terms, and how many warps share it.

    A loop whose loads Triton has under way ahead of it has `stages`; of others that number means nothing.
    """

    block: int
    warps: int
    stages: int = 0

    def __str__(self) -> str:
        ahead = f" x {self.stages}" if self.stages else ""
        return f"{self.block} x {self.warps}{ahead}"


class _Known(NamedTuple):
    """A kernel that was compiled, what it was compiled of, and the constants of a launch, which are passed by."""

    kernel: JITFunction[Any]
    compiled: CompiledKernel
    constants: list[Any]


_MOST_KNOWN = 1 << 13
_known: dict[tuple[Any, ...], _Known] = {}


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: Sequence[torch.Tensor | None],
    numbers: Sequence[float],
    /,
    **constants: Any,
) -> None:
    """As `kernel[grid](*tensors, *numbers, **constants)`, but what was launched before takes half of the time.

    Triton compiles a kernel for constants and types, for which numbers are 1 or multiples of 16, and for which tensors
    begin at multiples of 16 bytes. Where constants and numbers are the same, and tensors of the same types begin as far
    from such multiples, Triton is not asked again. What else it looks at is taken for settled: its options, and the
    globals that kernels read. Where anybody hooks launches, they are Triton's.
    """
    if not isinstance(kernel, JITFunction):  # it is interpreted
        kernel[grid](*tensors, *numbers, **constants)
        return
    device = driver.active.get_current_device()
    addresses: list[int | None] = []
    kinds: list[tuple[torch.dtype, int] | None] = []
    for tensor in tensors:
        address = None if tensor is None else tensor.data_ptr()
        addresses.append(address)
        kinds.append(None if tensor is None or address is None else (tensor.dtype, address % 16))
    types = (*map(type, numbers),)  # 1 equals 1.0
    key = (id(kernel), device, (*constants,), (*constants.values(),), (*numbers,), types, (*kinds,))
    known = _known.get(key)
    if known is None or knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls:
        _remember(key, kernel, kernel[grid](*tensors, *numbers, **constants), len(tensors) + len(numbers), constants)
        return
    _, compiled, passed_by = known
    x, y, z = (*grid, 1, 1)[:3]
    stream = driver.active.get_current_stream(device)
    settled = compiled.function, compiled.packed_metadata, None, None, None  # no hooks, and nothing for them
    compiled.run(x, y, z, stream, *settled, *addresses, *numbers, *passed_by)


def _remember(
    key: tuple[Any, ...], kernel: JITFunction[Any], compiled: Any, given: int, constants: dict[str, Any]
) -> None:
    """What Triton launched, unless it was kept from that; only a GPU of NVIDIA's is known to compile by no more."""
    rest = kernel.params[given:]
    if not all(param.is_constexpr for param in rest):
        raise ValueError(f"{kernel.__name__} is launched with numbers that are given by name")
    if isinstance(compiled, CompiledKernel) and compiled.metadata.target.backend == "cuda":
        if len(_known) >= _MOST_KNOWN:  # numbers of rows differ from prompt to prompt
            _known.clear()
        _known[key] = _Known(kernel, compiled, [constants.get(param.name) for param in rest])


def pieces(size: int, piece: int) -> int:
    """How many pieces hold `size`."""
    return -(-size // piece)


@cache
def power_of_two(least: int) -> int:
    """The smallest power of two that is at least `least`, and at least 1."""
    return 1 << max(0, least - 1).bit_length()


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs a device runs side by side, at least."""
    if device.type != "cuda":
        return _INTERPRETED
    return torch.cuda.get_device_properties(device).multi_processor_count


def shared_memory(device: torch.device) -> int:
    """Bytes that one program may have. The interpreter plays an A100."""
    if device.type == "cuda":
        return _opted_in(device)
    return shared_memory_of(80 if knobs.runtime.interpret else driver.active.get_current_target().arch)


def shared_memory_of(architecture: int) -> int:
    """As an architecture has it: one that is not known, no more than the least."""
    return SHARED_MEMORY.get(architecture, min(SHARED_MEMORY.values()))


@cache
def _opted_in(device: torch.device) -> int:
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def early_start(device: torch.device) -> dict[str, bool]:
    """Options of a kernel that calls `await_previous`: from Hopper on it may begin while the one before it still runs.

    Programmatic dependent launch: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#programmatic-dependent-launch-and-synchronization
    """
    return _options_of(device) if device.type == "cuda" else _early(not knobs.runtime.interpret and _target_is_hopper())


@cache
def _options_of(gpu: torch.device) -> dict[str, bool]:
    return _early(torch.cuda.get_device_capability(gpu) >= (9, 0))


def _early(hopper: bool) -> dict[str, bool]:
    return {"EARLY": True, "launch_pdl": True} if hopper else {"EARLY": False}


def _target_is_hopper() -> bool:
    """Of kernels that are compiled for a GPU that is not here."""
    return bool(driver.active.get_current_target().arch >= 90)


@triton.jit
def await_previous(EARLY: tl.constexpr):
    """Wait for the kernel before: only then may what it gave be read, or memory written.

    What is read earlier must be what no kernel writes: weights.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release_next(EARLY: tl.constexpr):
    """Let the next kernel begin: when this one has little left to do, for the next takes room from it."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
