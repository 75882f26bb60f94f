"""Packed weights of linear layers: laid out once, when a model is loaded, as the native kernels read them."""

import ctypes
from dataclasses import dataclass

import torch

from tercet.kernels.native import abi
from tercet.kernels.native.library import Library
from tercet.kernels.ops.linear import quantise_weight

_PANEL = 16
"""Outputs of a panel: see csrc/format.h."""


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
    int8: bool = False,
    interleave: bool = False,
) -> PackedLinear:
    """Pack weight [n, k] (float32 or bfloat16) and bias [n]; `int8` rounds weights to 8 bits.

    `interleave` is for a gate-up projection [2 * m, k]: panels of gate and of up alternate, as the decoder reads them.
    """
    if weight.dtype not in (torch.float32, torch.bfloat16) or weight.device.type != "cpu":
        raise ValueError(f"weights to pack are float32 or bfloat16 on the CPU, not {weight.dtype} on {weight.device}")
    outputs, inputs = weight.shape
    matrix, scales = quantise_weight(weight) if int8 else (weight, None)
    matrix, dtype = matrix.contiguous(), abi.FORMATS[matrix.dtype]
    parts = matrix.chunk(2) if interleave else (matrix,)
    if interleave and outputs % 2:
        raise ValueError("gate and up must be of one size")
    padded = sum(_padded(len(part)) for part in parts)
    panels = torch.empty(int(library.functions.packed_bytes(padded, inputs, dtype)), dtype=torch.uint8)
    for start, part in enumerate(parts):
        library.functions.pack(part.data_ptr(), len(part), inputs, dtype, start, len(parts), panels.data_ptr())
    offsets = 128 * matrix.sum(-1, dtype=torch.int32) if int8 else None
    arrays = [None if x is None else _spread(x, interleave) for x in (scales, offsets, bias)]
    if arrays[2] is not None:
        arrays[2] = arrays[2].float()
    pointers = [None if x is None else x.data_ptr() for x in arrays]
    struct = abi.Linear(outputs, inputs, dtype, panels.data_ptr(), *pointers)
    return PackedLinear(library, struct, panels, *arrays)


def _padded(count: int) -> int:
    return -(-count // _PANEL) * _PANEL


def _spread(x: torch.Tensor, interleave: bool) -> torch.Tensor:
    """A value for each output, in the order of the panels, zero where a panel has no output."""
    parts = x.chunk(2) if interleave else (x,)
    panels = [torch.nn.functional.pad(part, (0, _padded(len(part)) - len(part))).view(-1, _PANEL) for part in parts]
    return torch.stack(panels, 1).flatten().contiguous()
