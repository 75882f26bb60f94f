"""Packed weights of 4 and 8 bits with a scale, and perhaps a minimum, for each block of inputs: see csrc/blocks.h."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import torch

from tercet.kernels.native import abi
from tercet.kernels.native.library import Library
from tercet.kernels.native.linear import PANEL, PackedLinear, padded, spread_bias, zeroed
from tercet.kernels.ops.quantized import QuantizedWeight, concat_rows, unpack_int4

Activations = Literal["int8", "float32"]
"""Inputs of products: int8 with a scale for every 32 of a row, or float32."""

_BITS = {"int4": 4, "int8": 8}
"""Bits of a code, by format."""
_FORMATS = {"int8": abi.BLOCKS, "float32": abi.FLOAT_BLOCKS}
"""Number formats, by activations."""
_SMALL, _LARGE = 16, 32
"""Inputs of a block."""


def pack_blocks(
    library: Library,
    weight: QuantizedWeight | Sequence[QuantizedWeight],
    bias: torch.Tensor | None = None,
    *,
    activations: Activations = "int8",
    interleave: bool = False,
    allocate: Callable[[int], torch.Tensor] | None = None,
) -> PackedLinear:
    """Pack weights [n, k] of int4 or int8 codes with a scale for each 16 inputs, or a multiple of 16, of each output.

    Weights keep their values. Pieces may differ in format and block; all get the bits of the widest and the blocks of
    the smallest. `bias`, `interleave` and `allocate` are those of `pack_linear`. Raises ValueError for other weights.
    """
    pieces = _pieces(weight, interleave)
    sources = [_source(piece) for piece in pieces]
    for source in sources:
        library.functions.choose_coding(ctypes.byref(source))
    coding = _common([source.coding for source in sources])
    n, k = sum(source.n for source in sources), sources[0].k
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"a bias {list(bias.shape)} for {n} outputs")
    rows = sum(padded(source.n) for source in sources)
    panels = (allocate or zeroed)(int(library.functions.packed_block_bytes(rows, k, ctypes.byref(coding))))
    spread = None if bias is None else spread_bias(bias.float(), interleave)
    start, step = 0, len(sources) if interleave else 1
    for source in sources:
        packing = abi.Packing(_FORMATS[activations], start, step, panels.data_ptr(), None, None)
        library.functions.pack_blocks(ctypes.byref(source), ctypes.byref(coding), ctypes.byref(packing))
        start += 1 if interleave else padded(source.n) // PANEL
    pointers = panels.data_ptr(), None, None, None if spread is None else spread.data_ptr()
    struct = abi.Linear(n, k, _FORMATS[activations], *pointers, coding)
    return PackedLinear(library, struct, panels, None, None, spread)


def _pieces(weight: QuantizedWeight | Sequence[QuantizedWeight], interleave: bool) -> list[QuantizedWeight]:
    """Return pieces of one format and block that can be packed in turn, as `pack_linear` does."""
    pieces = [weight] if isinstance(weight, QuantizedWeight) else list(weight)
    for piece in pieces:
        height, width = piece.block
        if piece.format not in _BITS or height != 1 or (width % _SMALL and width < piece.shape[1]):
            raise ValueError(f"{piece.format} with blocks {list(piece.block)} is not packed in blocks of {_SMALL}")
        if piece.codes.device.type != "cpu" or piece.shape[1] != pieces[0].shape[1]:
            raise ValueError("pieces to pack are of one width, and on the CPU")
    if interleave and len(pieces) == 1:
        (n, k), whole = pieces[0].shape, pieces[0]
        pieces = [whole.part(rows, range(k)) for rows in (range(n // 2), range(n // 2, n))]
    if interleave and (len(pieces) != 2 or pieces[0].shape != pieces[1].shape):
        raise ValueError("gate and up must be two, of one size")
    wide = any(piece.format == "int8" for piece in pieces)
    block = _SMALL if any(piece.block[1] % _LARGE for piece in pieces) else _LARGE
    pieces = [_converted(piece, wide=wide, block=block) for piece in pieces]
    if not interleave and any(piece.shape[0] % PANEL for piece in pieces[:-1]):
        return [concat_rows(pieces)]
    return pieces


def _converted(weight: QuantizedWeight, *, wide: bool, block: int) -> QuantizedWeight:
    """Return the weight with blocks of so many inputs and minimums in place of zeros; `wide`: as int8."""
    k, minimums = weight.shape[1], weight.minimums
    if weight.zeros is not None:
        lowest = -weight.zeros * weight.scales
        minimums = lowest if minimums is None else lowest + minimums
    count = -(-k // block)

    def spread(values: torch.Tensor) -> torch.Tensor:
        each = min(weight.block[1], count * block) // block
        return values.float().repeat_interleave(each, 1)[:, :count].contiguous()

    codes = weight.codes
    if wide and weight.format == "int4":
        codes = unpack_int4(codes.contiguous()).to(torch.int8)
    return replace(
        weight,
        format="int8" if wide else "int4",
        codes=codes.contiguous(),
        scales=spread(weight.scales),
        zeros=None,
        minimums=None if minimums is None else spread(minimums),
        block=(1, block),
    )


def _source(weight: QuantizedWeight) -> abi.BlockSource:
    """Return the struct of a converted piece, which must outlive it."""
    coding = abi.Coding(_BITS[weight.format], weight.block[1], abi.SINGLES, 0)
    minimums = None if weight.minimums is None else weight.minimums.data_ptr()
    return abi.BlockSource(*weight.shape, coding, weight.codes.data_ptr(), weight.scales.data_ptr(), minimums)


def _common(codings: Sequence[abi.Coding]) -> abi.Coding:
    """Return a coding that holds all pieces."""
    types, zeros = {coding.scale_type for coding in codings}, {coding.zero for coding in codings}
    scale_type, zero = types.pop(), zeros.pop()
    if zeros:
        zero, zeros = -1, zeros | {zero}
    if types or (zero < 0 < max(zeros, default=0)):  # products of zeros and scales may have more digits than scales
        scale_type = abi.SINGLES
    return abi.Coding(codings[0].bits, codings[0].block, scale_type, zero)
