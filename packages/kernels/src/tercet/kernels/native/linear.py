"""Packed weights of linear layers: laid out once, when a model is loaded, as the native kernels read them."""

import ctypes
from dataclasses import dataclass
from typing import Literal

import torch

from tercet.kernels.memory import zeros
from tercet.kernels.native import abi
from tercet.kernels.native.library import Library
from tercet.kernels.ops.linear import quantise_int4, quantise_weight

Quantization = Literal["none", "int8", "int4"]
"""What weights are rounded to: int8 with a scale for each output, int4 with one for every 32 inputs of an output."""

_PANEL = 16
"""Outputs of a panel: see csrc/format.h."""
_SLICE = 256 * _PANEL
"""Outputs that are rounded at a time."""


@dataclass(frozen=True, eq=False)
class PackedLinear:
    """The weights of one linear layer. The struct points into the tensors, which live as long as this does."""

    library: Library
    struct: abi.Linear
    panels: torch.Tensor  # uint8
    scales: torch.Tensor | None  # float32 [padded n]
    offsets: torch.Tensor | None  # int32 [padded n]
    bias: torch.Tensor | None  # float32 [padded n]

    @property
    def outputs(self) -> int:
        """Elements of a row of `__call__`'s result."""
        return int(self.struct.n)

    @property
    def bytes(self) -> int:
        """Memory that the weights take."""
        return self.panels.numel()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X float32 [m, k] -> float32 [m, n]."""
        if x.dtype != torch.float32 or x.device.type != "cpu" or x.ndim != 2 or x.shape[1] != self.struct.k:
            raise ValueError(f"expected float32 [m, {self.struct.k}] on the CPU, not {x.dtype} {list(x.shape)}")
        x, out = x.contiguous(), torch.empty(len(x), self.outputs)
        self.library.functions.linear(ctypes.byref(self.struct), x.data_ptr(), len(x), out.data_ptr())
        return out

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Rows of the weight matrix: float32 [len(index), k]."""
        index = index.to(torch.int64).contiguous()
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < self.outputs:
            raise IndexError("no such row")
        out = torch.empty(len(index), int(self.struct.k))
        self.library.functions.unpack_rows(ctypes.byref(self.struct), index.data_ptr(), len(index), out.data_ptr())
        return out


def pack_linear(
    library: Library,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    quantization: Quantization = "none",
    interleave: bool = False,
) -> PackedLinear:
    """Pack weight [n, k] (float32 or bfloat16) and bias [n]; with a `quantization` weights are rounded to its bits.

    `interleave` is for a gate-up projection [2 * m, k]: panels of gate and of up alternate, as the decoder reads them.
    """
    if weight.dtype not in (torch.float32, torch.bfloat16) or weight.device.type != "cpu":
        raise ValueError(f"weights to pack are float32 or bfloat16 on the CPU, not {weight.dtype} on {weight.device}")
    if interleave and len(weight) % 2:
        raise ValueError("gate and up must be of one size")
    parts = weight.chunk(2) if interleave else (weight,)
    outputs, inputs = weight.shape
    form = {"none": abi.FORMATS[weight.dtype], "int8": abi.INT8, "int4": abi.INT4}[quantization]
    size = library.functions.packed_bytes(sum(_padded(len(part)) for part in parts), inputs, form)
    panels = zeros([int(size)], torch.uint8)
    rounded = [
        piece for i, part in enumerate(parts) for piece in _pack_part(library, part, form, i, len(parts), panels)
    ]
    scales, offsets = (torch.cat(pieces) for pieces in zip(*rounded, strict=True)) if rounded else (None, None)
    arrays = [None if x is None else _spread(x, interleave) for x in (scales, offsets, bias)]
    if arrays[2] is not None:
        arrays[2] = arrays[2].float()
    pointers = [None if x is None else x.data_ptr() for x in arrays]
    struct = abi.Linear(outputs, inputs, form, panels.data_ptr(), *pointers)
    return PackedLinear(library, struct, panels, *arrays)


def _pack_part(
    library: Library, weight: torch.Tensor, form: int, first: int, step: int, panels: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pack into every `step`-th panel from the first, a slice at a time, so that rounding needs little memory.

    Returns the scales and offsets of each slice of int8.
    """
    rounded = []
    for row in range(0, len(weight), _SLICE):
        piece = weight[row : row + _SLICE]
        where = (first + row // _PANEL * step, step, panels.data_ptr())
        if form == abi.INT4:
            steps, scales = (x.contiguous() for x in quantise_int4(piece))
            library.functions.pack_int4(steps.data_ptr(), scales.data_ptr(), *piece.shape, *where)
            continue
        if form == abi.INT8:
            piece, scales = quantise_weight(piece)
            rounded.append((scales, 128 * piece.sum(-1, dtype=torch.int32)))
        piece = piece.contiguous()
        library.functions.pack(piece.data_ptr(), *piece.shape, form, *where)
    return rounded


def _padded(count: int) -> int:
    return -(-count // _PANEL) * _PANEL


def _spread(x: torch.Tensor, interleave: bool) -> torch.Tensor:
    """A value for each output, in the order of the panels, zero where a panel has no output."""
    parts = x.chunk(2) if interleave else (x,)
    panels = [torch.nn.functional.pad(part, (0, _padded(len(part)) - len(part))).view(-1, _PANEL) for part in parts]
    return torch.stack(panels, 1).flatten().contiguous()
