"""Launch parameters: power-of-two block sizes, multiprocessors, shared memory, and programmatic dependent launch."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver

_INTERPRETED = 32
"""Number of multiprocessors that the interpreter pretends to have."""

_KIBIBYTES = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
SHARED_MEMORY = {architecture: kibibytes << 10 for architecture, kibibytes in _KIBIBYTES.items()}
"""Bytes of shared memory of one program by architecture, for GPUs that are absent.

https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities"""


@dataclass(frozen=True)
class Tiling:
    """Size of one program of an operation, in units of the operation, and its number of warps.

    `stages` is the number of stages of a software-pipelined loop; other kernels ignore it.
    """

    block: int
    warps: int
    stages: int = 0

    def __str__(self) -> str:
        ahead = f" x {self.stages}" if self.stages else ""
        return f"{self.block} x {self.warps}{ahead}"


@cache
def power_of_two(least: int) -> int:
    """Return the smallest power of two that is at least `least` and at least 1."""
    return 1 << max(0, least - 1).bit_length()


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device."""
    if device.type != "cuda":
        return _INTERPRETED
    return torch.cuda.get_device_properties(device).multi_processor_count


def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory of one program. The interpreter pretends to be an A100."""
    return _opted_in(device) if device.type == "cuda" else shared_memory_of(_played())


def shared_memory_of(architecture: int) -> int:
    """Return the bytes of an architecture; unknown ones get the smallest known value."""
    return SHARED_MEMORY.get(architecture, min(SHARED_MEMORY.values()))


@cache
def _opted_in(device: torch.device) -> int:
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def pdl_options(device: torch.device) -> dict[str, bool]:
    """Return the launch options of a kernel with `pdl_wait`: from Hopper on, it may start before its predecessor ends.

    Programmatic dependent launch:
    https://docs.nvidia.com/cuda/cuda-c-programming-guide/#programmatic-dependent-launch-and-synchronization
    """
    return _options_of(device) if device.type == "cuda" else _early(_played())


@cache
def _options_of(gpu: torch.device) -> dict[str, bool]:
    return _early(_architecture_of(gpu))


def multiplies_from_memory(device: torch.device) -> bool:
    """Return whether tensor cores read operands from shared memory (wgmma): data-center GPUs from Hopper on.

    https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions
    """
    architecture = _architecture_of(device) if device.type == "cuda" else _played()
    return 90 <= architecture < 120


@cache
def _architecture_of(gpu: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(gpu)
    return 10 * major + minor


def _played() -> int:
    """Return the architecture of an absent GPU: the interpreter's, or the target of compilation."""
    return 80 if knobs.runtime.interpret else int(driver.active.get_current_target().arch)


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Wait for the preceding kernel; before that, its results must not be read and no memory written.

    Only data that no kernel writes (weights) may be read earlier.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def pdl_launch_next(PDL: tl.constexpr):
    """Let the next kernel start. Call it when little work is left, because the next kernel takes resources."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


def cdiv(size: int, piece: int) -> int:
    """Return the ceiling of size / piece on the host (`triton.cdiv` costs 2 us a call)."""
    return -(-size // piece)


def _early(architecture: int) -> dict[str, bool]:
    return {"PDL": True, "launch_pdl": True} if architecture >= 90 else {"PDL": False}
