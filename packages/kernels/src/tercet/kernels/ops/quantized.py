"""Quantized weights: one layout for every checkpoint format, and the linear layer over it.

w[i, j] = (code[i, j] - zero) * scale + minimum, where zero, scale and minimum belong to the block of rows and columns
that contains (i, j). Activations are not quantized, except by kernels that say so (`rounded`). "mxfp4" is the format of
the OCP Microscaling specification: e2m1 codes, e8m0 scales.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from tercet.kernels.ops.linear import linear

Format = Literal["fp8", "int8", "int4", "mxfp4"]
EightBits = Literal["fp8", "int8"]
PACKED = "int4", "mxfp4"
"""Formats with two codes in a byte."""

HALF = 16
"""Distance of the two columns in a byte of two codes; the low and the high halves of bytes are runs of adjacent
columns."""


E2M1 = 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0
"""Values of the mxfp4 codes 0 to 7; codes 8 to 15 are their negatives."""
MXFP4_BLOCK = 1, 32


@dataclass(frozen=True, eq=False, kw_only=True)
class QuantizedWeight:
    """Quantized weight [n, k]. Blocks at the edges may be smaller than `block`."""

    format: Format
    codes: torch.Tensor  # fp8: the bits of e4m3, uint8 [n, k]; int8: int8 [n, k]; PACKED: uint8 [n, k / 2], `pack_int4`
    scales: torch.Tensor  # float32 [blocks of rows, blocks of columns]; mxfp4: uint8, exponent of 2 plus 127
    zeros: torch.Tensor | None  # float32 integers, like scales; int4 only, None where codes are signed
    block: tuple[int, int]
    minimums: torch.Tensor | None = None  # float32, like scales; int4 and int8 only, and only on a CPU
    activations: EightBits | None = None
    """Format to which a product may round its inputs, because the checkpoint was made for that."""

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k)."""
        n, k = self.codes.shape
        return n, 2 * k if self.format in PACKED else k

    @property
    def nbytes(self) -> int:
        """Bytes that a product with the weight reads."""
        every = self.codes, self.scales, self.zeros, self.minimums
        return sum(tensor.nbytes for tensor in every if tensor is not None)

    def to(self, device: torch.device) -> "QuantizedWeight":
        """Return the weight on another device."""
        return self._each(lambda values: values.to(device), lambda values: values.to(device))

    def rows(self, index: torch.Tensor) -> "QuantizedWeight":
        """Return some rows in the given order. Raises ValueError if several rows share a scale."""
        if self.block[0] != 1:
            raise ValueError(f"{self.block[0]} rows share a scale")
        return self._each(lambda values: values[index], lambda values: values[index])

    def part(self, rows: range, columns: range) -> "QuantizedWeight":
        """Return a view of some rows and columns. Raises ValueError if that would split blocks or bytes."""
        (height, width), k = self.block, self.shape[1]
        if height != 1:
            raise ValueError(f"{height} rows share a scale")
        unit = 2 * HALF if self.format in PACKED else 1
        if width < k:
            unit = math.lcm(unit, width)
        if columns.start % unit or (columns.stop % unit and columns.stop != k):
            raise ValueError(f"columns {columns.start} to {columns.stop} are not whole units of {unit}")

        def some(values: torch.Tensor, each: int) -> torch.Tensor:
            """Slice a tensor in which each column stands for `each` columns of the weight."""
            return values[rows.start : rows.stop, columns.start // each : -(-columns.stop // each)]

        each = 2 if self.format in PACKED else 1
        parts = self._each(lambda codes: some(codes, each), lambda values: some(values, min(width, k)))
        return parts if width < k or len(columns) == k else replace(parts, block=(1, len(columns)))

    def _each(
        self, codes: Callable[[torch.Tensor], torch.Tensor], values: Callable[[torch.Tensor], torch.Tensor]
    ) -> "QuantizedWeight":
        """Return the weight with `codes` applied to the codes, and `values` to all that blocks have."""
        return replace(
            self,
            codes=codes(self.codes),
            scales=values(self.scales),
            zeros=None if self.zeros is None else values(self.zeros),
            minimums=None if self.minimums is None else values(self.minimums),
        )


def with_tall_blocks(weight: QuantizedWeight, rows: int) -> QuantizedWeight:
    """Return the weight with one scale for each `rows` rows, if it has a scale for each row and these are equal.

    Only weights without zeros and minimums are changed.
    """
    n = weight.shape[0]
    if weight.block[0] != 1 or n % rows or weight.zeros is not None or weight.minimums is not None:
        return weight
    blocks = weight.scales.view(n // rows, rows, -1)
    if not torch.equal(blocks, blocks[:, :1].expand_as(blocks)):
        return weight
    return replace(weight, scales=blocks[:, 0].contiguous(), block=(rows, weight.block[1]))


def pack_int4(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes 0 to 15, uint8 [n, k], two in a byte: of 32 columns, byte j has column j below column j + 16."""
    n, k = codes.shape
    if k % (2 * HALF):
        raise ValueError(f"{k} columns are no multiple of {2 * HALF}")
    low, high = codes.view(n, -1, 2, HALF).to(torch.uint8).unbind(2)
    return (low | high << 4).reshape(n, k // 2)


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """Return the codes of `pack_int4`, uint8 [n, k]."""
    halves = packed.view(len(packed), -1, HALF)
    return torch.stack([halves & 15, halves >> 4], 2).reshape(len(packed), -1)


def concat_rows(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Concatenate weights of one format and block, and of the same inputs, along their outputs."""
    first, minimums = parts[0], None
    zeros = None if first.zeros is None else torch.cat([part.zeros for part in parts if part.zeros is not None])
    codes, scales = torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts])
    if any(part.minimums is not None for part in parts):
        each = [torch.zeros_like(part.scales) if part.minimums is None else part.minimums for part in parts]
        minimums = torch.cat(each)
    return replace(first, codes=codes, scales=scales, zeros=zeros, minimums=minimums)


def dequantize(weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the weight [n, k] in `dtype`."""
    n, k = weight.shape
    match weight.format:
        case "fp8":
            codes = weight.codes.view(torch.float8_e4m3fn).float()
        case "int8":
            codes = weight.codes.float()
        case "int4":
            codes = unpack_int4(weight.codes).float()
        case "mxfp4":
            return _dequantize_mxfp4(weight, dtype)
    if weight.zeros is not None:
        codes = codes - _spread(weight.zeros, weight.block, n, k)
    wide = codes * _spread(weight.scales, weight.block, n, k)
    if weight.minimums is not None:
        wide = wide + _spread(weight.minimums, weight.block, n, k)
    return wide.to(dtype)


def _dequantize_mxfp4(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Dequantize by the bits of float16, in few passes: on a CPU, experts are unpacked at each use.

    A code is shifted to the top, so that its sign bit is that of 16 bits, then shifted right arithmetically, so that
    its other bits become the lowest bits of the exponent and the highest of the mantissa. The result is 2**14 times too
    small.
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
    """Convert bytes of e8m0 to the powers of two that they encode, float32."""
    return torch.ldexp(torch.ones_like(e8m0, dtype=torch.float32), e8m0.int() - 127)


def linear_quantized(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return X [..., k] @ weight [n, k].T + bias, in x's dtype, summed in float32."""
    rows = x.reshape(-1, x.shape[-1]).float()
    return linear(rows, dequantize(weight), bias).to(x.dtype).view(*x.shape[:-1], -1)


def round_activations(x: torch.Tensor) -> torch.Tensor:
    """Round X [m, k] to int8 with a scale for each 32 inputs of a row, and return the values: float32 [m, k].

    Native products with `activations="int8"` of `pack_blocks` have such inputs.
    """
    blocks = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % (2 * HALF))).view(len(x), -1, 2 * HALF)
    scales = blocks.abs().amax(2, keepdim=True) / 127
    steps = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)).round()
    return (steps * scales).view(len(x), -1)[:, : x.shape[1]]


def quantize(weight: torch.Tensor, format: Format, block: tuple[int, int]) -> QuantizedWeight:  # noqa: A002
    """Quantize a weight [n, k] by the largest element of each block, for tests and dummy weights.

    mxfp4 always uses its own block size.
    """
    if format == "mxfp4":
        return _quantize_mxfp4(weight.float())
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


def _quantize_mxfp4(weight: torch.Tensor) -> QuantizedWeight:
    """Quantize so that the largest element of a block becomes 4 to 6; values above 6 are rounded down to 6."""
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
    """Repeat the value of each block over its elements: [n, k]."""
    return values.repeat_interleave(block[0], 0)[:n].repeat_interleave(block[1], 1)[:, :k]
