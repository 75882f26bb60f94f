"""Weights in few bits: one layout for every checkpoint format, and the linear layer over it.

w[i, j] = (code[i, j] - zero) * scale, where zero and scale belong to the block of rows and columns that (i, j) lies in.
Activations stay as they are. "mxfp4" is that of the OCP Microscaling Formats: e2m1 codes, and scales in e8m0.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from tercet.kernels.ops.linear import linear

Format = Literal["fp8", "int8", "int4", "mxfp4"]
PACKED = "int4", "mxfp4"
"""Those of two codes to a byte."""

HALF = 16
"""A byte of two codes holds two columns this far apart, so that both halves of a byte are runs of neighbours."""


E2M1 = 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0
"""What codes of mxfp4 stand for; 8 more are the same below zero."""
MXFP4_BLOCK = 1, 32


@dataclass(frozen=True, eq=False, kw_only=True)
class QuantizedWeight:
    """A weight [n, k]. Blocks at the edges may be smaller than `block`."""

    format: Format
    codes: torch.Tensor  # fp8: the bits of e4m3, uint8 [n, k]; int8: int8 [n, k]; PACKED: uint8 [n, k / 2], `pack_int4`
    scales: torch.Tensor  # float32 [blocks of rows, blocks of columns]; mxfp4: uint8, 127 more than a power of two
    zeros: torch.Tensor | None  # float32, whole numbers, as the scales; none where codes are signed: for all but int4
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k)."""
        n, k = self.codes.shape
        return n, 2 * k if self.format in PACKED else k

    @property
    def nbytes(self) -> int:
        """What is read of it when it is computed with."""
        return self.codes.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    def to(self, device: torch.device) -> "QuantizedWeight":
        """The same on another device."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        codes, scales = self.codes.to(device), self.scales.to(device)
        return QuantizedWeight(format=self.format, codes=codes, scales=scales, zeros=zeros, block=self.block)

    def rows(self, index: torch.Tensor) -> "QuantizedWeight":
        """Those rows, in that order. Raises ValueError where several share a scale."""
        if self.block[0] != 1:
            raise ValueError(f"{self.block[0]} rows share a scale")
        codes, scales = self.codes[index], self.scales[index]
        zeros = None if self.zeros is None else self.zeros[index]
        return QuantizedWeight(format=self.format, codes=codes, scales=scales, zeros=zeros, block=self.block)

    def part(self, rows: range, columns: range) -> "QuantizedWeight":
        """Those rows and columns, of the same memory. Raises ValueError where blocks or bytes would be cut."""
        (height, width), k = self.block, self.shape[1]
        if height != 1:
            raise ValueError(f"{height} rows share a scale")
        unit = 2 * HALF if self.format in PACKED else 1
        if width < k:
            unit = math.lcm(unit, width)
        if columns.start % unit or (columns.stop % unit and columns.stop != k):
            raise ValueError(f"columns {columns.start} to {columns.stop} are not whole units of {unit}")

        def some(values: torch.Tensor, each: int) -> torch.Tensor:
            """Of a tensor whose columns stand for `each` so many."""
            return values[rows.start : rows.stop, columns.start // each : -(-columns.stop // each)]

        scaled = min(width, k)
        return QuantizedWeight(
            format=self.format,
            codes=some(self.codes, 2 if self.format in PACKED else 1),
            scales=some(self.scales, scaled),
            zeros=None if self.zeros is None else some(self.zeros, scaled),
            block=self.block if width < k or len(columns) == k else (1, len(columns)),
        )


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


def dequantize(weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The weight in full, [n, k]."""
    n, k = weight.shape
    match weight.format:
        case "fp8":
            codes = weight.codes.view(torch.float8_e4m3fn).float()
        case "int8":
            codes = weight.codes.float()
        case "int4":
            codes = unpack_int4(weight.codes).float()
        case "mxfp4":
            return _dequantise_mxfp4(weight, dtype)
    if weight.zeros is not None:
        codes = codes - _spread(weight.zeros, weight.block, n, k)
    return (codes * _spread(weight.scales, weight.block, n, k)).to(dtype)


def _dequantise_mxfp4(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """By the bits of float16, in few passes: on a CPU experts are unpacked whenever they are used.

    A code's sign is put where that of 16 bits is and comes along to the right, where the other bits become a mantissa's
    highest and an exponent's lowest: 2**14 times less than they mean.
    """
    n, k = weight.shape
    scales = scales_of(weight.scales)[:, :, None]
    out = torch.empty(n, k // (2 * HALF), 2, HALF, dtype=dtype, device=weight.codes.device)
    for half, place in enumerate((12, 8)):
        bits = weight.codes.view(n, -1, HALF).to(torch.int16)
        bits <<= place
        bits >>= 3
        bits &= -0x7200
        out[:, :, half] = bits.view(torch.float16).float().mul_(2.0**14).mul_(scales)
    return out.view(n, k)


def scales_of(e8m0: torch.Tensor) -> torch.Tensor:
    """The powers of two that bytes of e8m0 stand for, float32."""
    return torch.ldexp(torch.ones_like(e8m0, dtype=torch.float32), e8m0.int() - 127)


def linear_quantized(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """X [..., k] @ weight [n, k].T + bias, in x's dtype, summed in float32."""
    rows = x.reshape(-1, x.shape[-1]).float()
    return linear(rows, dequantize(weight), bias).to(x.dtype).view(*x.shape[:-1], -1)


def quantize(weight: torch.Tensor, format: Format, block: tuple[int, int]) -> QuantizedWeight:  # noqa: A002
    """Round a weight [n, k] by the largest of each block: what tests and dummy weights are made by.

    Blocks of mxfp4 are its own, whichever are given.
    """
    if format == "mxfp4":
        return _quantise_mxfp4(weight.float())
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
    return QuantizedWeight(format=format, codes=codes, scales=scales, zeros=zeros, block=block)


def _quantise_mxfp4(weight: torch.Tensor) -> QuantizedWeight:
    """The largest of a block becomes 4 to 6 steps: what is above 6 is rounded down to that."""
    n, k = weight.shape
    blocks = weight.view(n, -1, MXFP4_BLOCK[1])
    exponents = blocks.abs().amax(2).frexp().exponent - 1
    scales = (exponents - 2 + 127).clamp(1, 254).to(torch.uint8)
    steps = (blocks / scales_of(scales)[:, :, None]).view(n, k)
    numbers = torch.tensor(E2M1, device=weight.device)
    codes = torch.bucketize(steps.abs(), (numbers[1:] + numbers[:-1]) / 2) | (steps < 0).int() * 8
    packed = pack_int4(codes.to(torch.uint8))
    return QuantizedWeight(format="mxfp4", codes=packed, scales=scales, zeros=None, block=MXFP4_BLOCK)


def _spread(values: torch.Tensor, block: tuple[int, int], n: int, k: int) -> torch.Tensor:
    """One value for each block, repeated over its elements: [n, k]."""
    return values.repeat_interleave(block[0], 0)[:n].repeat_interleave(block[1], 1)[:, :k]
