"""What every launch needs to know: block sizes are powers of two, how wide the machine is, and what it can overlap."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver

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
    return _opted_in(device) if device.type == "cuda" else shared_memory_of(_played())


def shared_memory_of(architecture: int) -> int:
    """As an architecture has it: one that is not known, no more than the least."""
    return SHARED_MEMORY.get(architecture, min(SHARED_MEMORY.values()))


@cache
def _opted_in(device: torch.device) -> int:
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def early_start(device: torch.device) -> dict[str, bool]:
    """Options of a kernel that calls `pdl_wait`: from Hopper on it may begin while the one before it still runs.

    Programmatic dependent launch: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#programmatic-dependent-launch-and-synchronization
    """
    return _options_of(device) if device.type == "cuda" else _early(_played())


@cache
def _options_of(gpu: torch.device) -> dict[str, bool]:
    return _early(_architecture_of(gpu))


def multiplies_from_memory(device: torch.device) -> bool:
    """Whether tensor cores read what they multiply from shared memory: those of servers, from Hopper on.

    https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions
    """
    architecture = _architecture_of(device) if device.type == "cuda" else _played()
    return 90 <= architecture < 120


@cache
def _architecture_of(gpu: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(gpu)
    return 10 * major + minor


def _played() -> int:
    """The architecture of a GPU that is not here: the interpreter's, or the one that kernels are compiled for."""
    return 80 if knobs.runtime.interpret else int(driver.active.get_current_target().arch)


@triton.jit
def pdl_wait(EARLY: tl.constexpr):
    """Wait for the kernel before: only then may what it gave be read, or memory written.

    What is read earlier must be what no kernel writes: weights.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def pdl_launch_next(EARLY: tl.constexpr):
    """Let the next kernel begin: when this one has little left to do, for the next takes room from it."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


def cdiv(size: int, piece: int) -> int:
    """`triton.cdiv` for the host, which that takes 2 us."""
    return -(-size // piece)


def _early(architecture: int) -> dict[str, bool]:
    return {"EARLY": True, "launch_pdl": True} if architecture >= 90 else {"EARLY": False}
