"""Weights in few bits: one layout for every checkpoint format, and the linear layer over it.

w[i, j] = (code[i, j] - zero) * scale, where zero and scale belong to the block of rows and columns that (i, j) lies in.
Activations stay as they are.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from tercet.kernels.ops.linear import linear

Format = Literal["fp8", "int8", "int4"]

HALF = 16
"""An int4 byte holds two columns this far apart, so that both halves of a byte are runs of neighbours."""


@dataclass(frozen=True, eq=False, kw_only=True)
class QuantisedWeight:
    """A weight [n, k]. Blocks at the edges may be smaller than `block`."""

    format: Format
    codes: torch.Tensor  # fp8: the bits of e4m3, uint8 [n, k]; int8: int8 [n, k]; int4: uint8 [n, k / 2], `pack_int4`
    scales: torch.Tensor  # float32 [blocks of rows, blocks of columns]
    zeros: torch.Tensor | None  # float32, whole numbers, as the scales; none for fp8 and int8, whose codes are signed
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k)."""
        n, k = self.codes.shape
        return n, 2 * k if self.format == "int4" else k

    def to(self, device: torch.device) -> "QuantisedWeight":
        """The same on another device."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        codes, scales = self.codes.to(device), self.scales.to(device)
        return QuantisedWeight(format=self.format, codes=codes, scales=scales, zeros=zeros, block=self.block)

    def rows(self, index: torch.Tensor) -> "QuantisedWeight":
        """Those rows, in that order. Raises ValueError where several share a scale."""
        if self.block[0] != 1:
            raise ValueError(f"{self.block[0]} rows share a scale")
        codes, scales = self.codes[index], self.scales[index]
        zeros = None if self.zeros is None else self.zeros[index]
        return QuantisedWeight(format=self.format, codes=codes, scales=scales, zeros=zeros, block=self.block)


def pack_int4(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0 to 15, uint8 [n, k], two in a byte: of 32 columns, byte j has column j below column j + 16."""
    n, k = codes.shape
    if k % (2 * HALF):
        raise ValueError(f"{k} columns are no multiple of {2 * HALF}")
    low, high = codes.view(n, -1, 2, HALF).to(torch.uint8).unbind(2)
    return (low | high << 4).reshape(n, k // 2)


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """The codes of `pack_int4`, uint8 [n, k]."""
    halves = packed.view(len(packed), -1, HALF)
    return torch.stack([halves & 15, halves >> 4], 2).reshape(len(packed), -1)


def dequantise(weight: QuantisedWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The weight in full, [n, k]."""
    n, k = weight.shape
    match weight.format:
        case "fp8":
            codes = weight.codes.view(torch.float8_e4m3fn).float()
        case "int8":
            codes = weight.codes.float()
        case "int4":
            codes = unpack_int4(weight.codes).float()
    if weight.zeros is not None:
        codes = codes - _spread(weight.zeros, weight.block, n, k)
    return (codes * _spread(weight.scales, weight.block, n, k)).to(dtype)


def linear_quantised(x: torch.Tensor, weight: QuantisedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """X [..., k] @ weight [n, k].T + bias, in x's dtype, summed in float32."""
    rows = x.reshape(-1, x.shape[-1]).float()
    return linear(rows, dequantise(weight), bias).to(x.dtype).view(*x.shape[:-1], -1)


def quantise(weight: torch.Tensor, format: Format, block: tuple[int, int]) -> QuantisedWeight:  # noqa: A002
    """Round a weight [n, k] by the largest of each block: what tests and dummy weights are made by."""
    n, k = weight.shape
    block = min(block[0], n), min(block[1], k)
    wide = weight.float()
    largest = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}[format]
    rows, columns = (-(-size // step) for size, step in zip((n, k), block, strict=True))
    padded = torch.nn.functional.pad(wide.abs(), (0, columns * block[1] - k, 0, rows * block[0] - n))
    scales = padded.view(rows, block[0], columns, block[1]).amax((1, 3)) / largest
    steps = wide / _spread(scales.clamp(min=torch.finfo(torch.float32).tiny), block, n, k)
    zeros = None
    match format:
        case "fp8":
            codes = steps.to(torch.float8_e4m3fn).view(torch.uint8)
        case "int8":
            codes = steps.round().to(torch.int8)
        case "int4":
            codes = pack_int4((steps.round() + 8).to(torch.uint8))
            zeros = torch.full_like(scales, 8)
    return QuantisedWeight(format=format, codes=codes, scales=scales, zeros=zeros, block=block)


def _spread(values: torch.Tensor, block: tuple[int, int], n: int, k: int) -> torch.Tensor:
    """One value for each block, repeated over its elements: [n, k]."""
    return values.repeat_interleave(block[0], 0)[:n].repeat_interleave(block[1], 1)[:, :k]
