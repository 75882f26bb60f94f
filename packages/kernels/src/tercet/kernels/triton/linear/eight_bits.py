"""Products of 8-bit activations and 8-bit weights on tensor cores, by torch's kernels.

The definition is `tercet.kernels.ops.rounded.linear_rounded`. `choices` says when they are used.
"""

from functools import cache

import torch

from tercet.kernels.ops.quantized import EightBits, QuantizedWeight
from tercet.kernels.ops.rounded import RoundedRows
from tercet.kernels.ops.store_kv import E4M3
from tercet.kernels.triton.linear.choices import BLOCK, Way
from tercet.kernels.triton.linear.rounding import scale_sums


def rounding_of(weight: QuantizedWeight, way: Way) -> tuple[EightBits, int]:
    """Return the format of activations, and the columns that share a scale."""
    return "int8" if way == "integers" else "fp8", BLOCK if way == "blocks" else weight.shape[1]


def linear_rounded(
    rounded: RoundedRows, weight: QuantizedWeight, bias: torch.Tensor | None, way: Way, dtype: torch.dtype
) -> torch.Tensor:
    """Return the rounded rows @ weight [n, k].T + bias, in `dtype`."""
    codes, scales = rounded
    if way == "integers":
        return scale_sums(torch._int_mm(codes, weight.codes.t()), scales, weight.scales, bias, dtype)
    turned = weight.codes.view(E4M3).t()
    one = unit_scale(codes.device)  # also for other ways: prompts, which come first, are in no graph
    if way == "sums":
        sums = torch._scaled_mm(codes, turned, one, one, out_dtype=torch.float32)
        return scale_sums(sums, scales, weight.scales, bias, dtype)
    out = torch._scaled_mm(codes, turned, scales, weight.scales.t(), out_dtype=dtype)
    return out if bias is None else out.add_(bias)


@cache
def unit_scale(device: torch.device) -> torch.Tensor:
    """Return a scale of 1. The first call must not be part of a CUDA graph, whose memory would hold it."""
    return torch.ones((), device=device)
