"""Activations rounded to 8 bits, as checkpoints of 8-bit weights are made for, and linear layers over them.

A row is rounded by its largest element, as a whole or in groups of columns: x[i, j] is about code[i, j] * scale[i, g].
"""

from typing import NamedTuple

import torch

from tercet.kernels.ops.linear import linear
from tercet.kernels.ops.quantized import EightBits, QuantizedWeight, dequantize
from tercet.kernels.ops.store_kv import E4M3
from tercet.kernels.ops.store_kv import LARGEST as LARGEST_E4M3

LARGEST: dict[EightBits, float] = {"fp8": LARGEST_E4M3, "int8": 127.0}
LEAST = 1e-10
"""Least element by which a row is rounded, so that no division overflows."""


class RoundedRows(NamedTuple):
    """Rounded activations."""

    codes: torch.Tensor  # e4m3 or int8 [rows, size]
    scales: torch.Tensor  # float32 [rows, groups of columns]


def round_rows(x: torch.Tensor, kind: EightBits, width: int) -> RoundedRows:
    """Round X [rows, size], with a scale for each `width` columns of a row; NaN and infinity make their scale NaN."""
    groups = x.float().view(len(x), -1, width)
    largest = groups.abs().amax(2).clamp(min=LEAST)
    steps = groups * (LARGEST[kind] / largest)[..., None]
    codes = steps.clamp(-LARGEST[kind], LARGEST[kind])
    scales = largest / LARGEST[kind] + (groups * 0).sum(2)
    rounded = codes.to(E4M3) if kind == "fp8" else codes.nan_to_num().round().to(torch.int8)
    return RoundedRows(rounded.view(x.shape), scales)


def in_full(rounded: RoundedRows) -> torch.Tensor:
    """Return the rounded values, float32 [rows, size]."""
    rows, groups = rounded.scales.shape
    return (rounded.codes.float().view(rows, groups, -1) * rounded.scales[..., None]).view(rows, -1)


def linear_rounded(
    rounded: RoundedRows, weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return the rounded rows @ weight [n, k].T + bias, in `dtype`, summed in float32."""
    return linear(in_full(rounded), dequantize(weight), bias).to(dtype)
