"""Packed weights of linear layers, repacked once at load time into the layout that the native kernels read."""

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch

from tercet.kernels.memory import zeros
from tercet.kernels.native import abi
from tercet.kernels.native.library import Library

Quantization = Literal["none", "int8", "int4"]
"""Weight formats: int8 has a scale for each output, int4 one for every 32 inputs of an output."""

_LINE = 64
"""Bytes of a cache line."""
PANEL = 16
"""Outputs of a panel: see csrc/format.h."""


@dataclass(frozen=True, eq=False)
class PackedLinear:
    """Packed weights of one linear layer. The struct points into the tensors, which this object owns."""

    library: Library
    struct: abi.Linear
    panels: torch.Tensor  # uint8
    scales: torch.Tensor | None  # float32 [padded n]
    offsets: torch.Tensor | None  # int32 [padded n]
    bias: torch.Tensor | None  # float32 [padded n]

    @property
    def outputs(self) -> int:
        """Number of outputs."""
        return int(self.struct.n)

    @property
    def bytes(self) -> int:
        """Memory of the weights, in bytes."""
        return self.panels.numel()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply X float32 [m, k]; returns float32 [m, n]."""
        if x.dtype != torch.float32 or x.device.type != "cpu" or x.ndim != 2 or x.shape[1] != self.struct.k:
            raise ValueError(f"expected float32 [m, {self.struct.k}] on the CPU, not {x.dtype} {list(x.shape)}")
        rows = x.shape[0]  # len() of a tensor takes as long as a small operation
        x, out = x.contiguous(), torch.empty(rows, self.outputs)
        self.library.functions.linear(ctypes.byref(self.struct), x.data_ptr(), rows, out.data_ptr())
        return out

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight matrix: float32 [len(index), k]."""
        index = index.to(torch.int64).contiguous()
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < self.outputs:
            raise IndexError("no such row")
        out = torch.empty(len(index), int(self.struct.k))
        self.library.functions.unpack_rows(ctypes.byref(self.struct), index.data_ptr(), len(index), out.data_ptr())
        return out


class PackedMLP(NamedTuple):
    """Packed weights of a gated MLP."""

    gate_up: PackedLinear  # interleaved
    down: PackedLinear


def pack_linear(
    library: Library,
    weight: torch.Tensor | Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
    *,
    quantization: Quantization = "none",
    interleave: bool = False,
    allocate: Callable[[int], torch.Tensor] | None = None,
) -> PackedLinear:
    """Pack weight [n, k] (float32 or bfloat16) and bias [n], rounding weights to `quantization`.

    The weight may be a sequence of row blocks, which need not be concatenated. `interleave` is for a gate-up projection
    [2 * m, k]: panels of gate and of up alternate, as the decoder reads them. `allocate` returns zeroed memory of so
    many bytes for the panels, in place of a new allocation.
    """
    pieces = _pieces(weight, interleave)
    dtype, inputs = pieces[0].dtype, pieces[0].shape[1]
    outputs, rows = sum(map(len, pieces)), sum(padded(len(piece)) for piece in pieces)
    if bias is not None and bias.shape != (outputs,):
        raise ValueError(f"a bias {list(bias.shape)} for {outputs} outputs")
    form = {"none": abi.FORMATS[dtype], "int8": abi.INT8, "int4": abi.INT4}[quantization]
    panels = (allocate or zeroed)(int(library.functions.packed_bytes(rows, inputs, form)))
    scales = torch.empty(rows, dtype=torch.float32) if form == abi.INT8 else None  # int4 scales are in the panels
    offsets = torch.empty(rows, dtype=torch.int32) if form == abi.INT8 else None
    spread = None if bias is None else spread_bias(bias.float(), interleave)
    pointers = [None if x is None else x.data_ptr() for x in (panels, scales, offsets, spread)]
    start, step = 0, len(pieces) if interleave else 1
    for piece in pieces:
        packing = abi.Packing(form, start, step, *pointers[:3])
        library.functions.pack(piece.data_ptr(), abi.FORMATS[dtype], *piece.shape, ctypes.byref(packing))
        start += 1 if interleave else padded(len(piece)) // PANEL
    return PackedLinear(library, abi.Linear(outputs, inputs, form, *pointers), panels, scales, offsets, spread)


def pack_linears(
    library: Library,
    weights: Iterable[torch.Tensor | Sequence[torch.Tensor]],
    biases: Sequence[torch.Tensor | None],
    *,
    quantization: Quantization = "none",
    interleave: bool = False,
) -> list[PackedLinear]:
    """Pack weights of one shape, each with its bias, into one contiguous allocation.

    Weights smaller than a huge page thus lie on huge pages, too.
    """
    run: list[torch.Tensor] = []

    def allocate(size: int) -> torch.Tensor:
        step = -(-size // _LINE) * _LINE
        if not run:
            run.extend(zeroed(step * len(biases)).view(len(biases), step))
        return run.pop(0)[:size]

    pack = partial(pack_linear, library, quantization=quantization, interleave=interleave, allocate=allocate)
    return [pack(weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def zeroed(size: int) -> torch.Tensor:
    """Return zeroed memory of so many bytes."""
    return zeros([size], torch.uint8)


def check_shape(linear: PackedLinear, outputs: int, inputs: int) -> None:
    """Raise ValueError if the weights have another shape."""
    if (linear.outputs, linear.struct.k) != (outputs, inputs):
        raise ValueError(f"a layer's weights are {[linear.outputs, linear.struct.k]}, not {[outputs, inputs]}")


def _pieces(weight: torch.Tensor | Sequence[torch.Tensor], interleave: bool) -> list[torch.Tensor]:
    """Return pieces that can be packed in turn: gate and up, or row blocks of whole panels except the last."""
    pieces = [weight] if isinstance(weight, torch.Tensor) else list(weight)
    for piece in pieces:
        if piece.dtype not in (torch.float32, torch.bfloat16) or piece.device.type != "cpu":
            raise ValueError(f"weights to pack are float32 or bfloat16 on the CPU, not {piece.dtype} on {piece.device}")
        if (piece.dtype, piece.shape[1:]) != (pieces[0].dtype, pieces[0].shape[1:]):
            raise ValueError("pieces to pack are of one dtype and width")
    if interleave and len(pieces) == 1:
        pieces = list(pieces[0].chunk(2))
    if interleave and (len(pieces) != 2 or len(pieces[0]) != len(pieces[1])):
        raise ValueError("gate and up must be two, of one size")
    if not interleave and any(len(piece) % PANEL for piece in pieces[:-1]):
        pieces = [torch.cat(pieces)]
    return [piece.contiguous() for piece in pieces]


def padded(count: int) -> int:
    """Round a number of outputs up to whole panels."""
    return -(-count // PANEL) * PANEL


def spread_bias(x: torch.Tensor, interleave: bool) -> torch.Tensor:
    """Return a value for each output in the order of the panels, padded with zeros."""
    parts = x.chunk(2) if interleave else (x,)
    panels = [torch.nn.functional.pad(part, (0, padded(len(part)) - len(part))).view(-1, PANEL) for part in parts]
    return torch.stack(panels, 1).flatten().contiguous()
