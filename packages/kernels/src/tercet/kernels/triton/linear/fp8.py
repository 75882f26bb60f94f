"""Conversion of 8-bit floats (e4m3: 4 bits of exponent, 3 of mantissa, no infinity) on any GPU.

NVIDIA GPUs have instructions that widen them from compute capability 8.9 on; older GPUs get them as raw bits. Rounding
uses bit operations everywhere: only new keys and values need it, and every GPU then stores the same.
"""

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver

from tercet.kernels.ops.store_kv import E4M3, LARGEST

_LARGEST: tl.constexpr = tl.constexpr(LARGEST)
_WIDENS = 89
"""First architecture that has the instruction."""


def readable(cache: torch.Tensor) -> torch.Tensor:
    """Return a cache as kernels can load it: e4m3 as raw bits where the GPU has no instruction for it."""
    return as_bits(cache) if cache.dtype == E4M3 and not _widens(cache.device) else cache


def as_bits(cache: torch.Tensor) -> torch.Tensor:
    """Return a cache of e4m3 as uint8; other caches are returned unchanged."""
    return cache.view(torch.uint8) if cache.dtype == E4M3 else cache


def _widens(device: torch.device) -> bool:
    """Return whether kernels can widen e4m3 on a device.

    On a CPU kernels are interpreted, with arithmetic that has no NaN in 8 bits, or compiled for another machine.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= divmod(_WIDENS, 10)
    return not knobs.runtime.interpret and driver.active.get_current_target().arch >= _WIDENS


@triton.jit
def widened(x, dtype: tl.constexpr):
    """Widen numbers from a `readable` tensor to another type.

    Shifted bits of e4m3 are those of a float16 with an exponent bias that is 8 larger.
    """
    if x.dtype == tl.uint8:
        bits = x.to(tl.int16)
        value = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
        x = tl.where((bits & 0x7F) == 0x7F, float("nan"), value)
    return x.to(dtype)


@triton.jit
def e4m3_bits(x):
    """Round float32 to the nearest e4m3, ties to even, clamped to the largest number; returns bits.

    A number below 2**-6 has a fixed step of 2**-9, which is the step of float32 from 2**14 on: adding 2**14 rounds it.
    """
    magnitude = tl.minimum(tl.abs(x), _LARGEST)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = (magnitude + 16384.0).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(magnitude < 0.015625, small, normal)
    code = tl.where(x != x, 0x7F, code)  # noqa: PLR0124 - true only for NaN
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)
