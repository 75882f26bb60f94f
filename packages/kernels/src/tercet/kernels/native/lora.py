"""LoRA adapters as the native decoder reads them: see csrc/lora.h, and `ops.lora` for the definition."""

import ctypes

import torch

from tercet.kernels.native import abi
from tercet.kernels.native.linear import PackedLinear
from tercet.kernels.ops.lora import LoRARows, LoRAWeights


class Adapters:
    """Owner of the structs that point into a decoder's adapters. The adapter weights may change in place."""

    def __init__(self) -> None:
        self._keep: list[object] = []
        self._places = 0
        self._rank = 0  # smallest maximum rank of all layers

    def address(self, weights: LoRAWeights | None, linear: PackedLinear | None) -> int | None:
        """Return the address of the adapter struct of a linear layer, or None without adapters.

        Raises ValueError for adapters that do not fit the layer, or whose number differs from that of earlier layers.
        """
        if weights is None:
            return None
        if linear is None:
            raise ValueError("a mixture's experts have no adapters")
        _check(weights, linear)
        places, rank, outputs = weights.b.shape
        if self._keep and places != self._places:
            raise ValueError(f"a layer has {places} adapters where another has {self._places}")
        self._places, self._rank = places, min(rank, self._rank) if self._keep else rank
        sizes = (ctypes.c_int64 * len(weights.parts))(*weights.parts)
        pointers = ctypes.addressof(sizes), weights.a.data_ptr(), weights.b.data_ptr()
        struct = abi.Adapters(rank, int(linear.struct.k), outputs, len(sizes), *pointers)
        self._keep.append((weights, sizes, struct))
        return ctypes.addressof(struct)

    def rows(self, rows: LoRARows) -> abi.AdapterRows | None:
        """Return a step's rows as the library's struct, or None if no token has an adapter.

        The struct points into the rows' table. Raises ValueError for a table unlike that of `LoRARows`, and for ranks
        above the maximum.
        """
        table, ranks = rows.table, list(rows.ranks)
        if table.dtype != torch.int32 or not table.is_contiguous() or table.device.type != "cpu":
            raise ValueError("a table of runs is contiguous int32 on the CPU")
        if table.ndim != 2 or table.shape[1] != 3 or len(table) != len(table if rows.runs is None else rows.runs):
            raise ValueError(f"a table {list(table.shape)} of runs {rows.runs}")
        if not len(table):
            return None
        if not self._keep:
            raise ValueError("tokens have adapters, but no layer does")
        if len(ranks) != self._places or not all(0 <= rank <= self._rank for rank in ranks):
            raise ValueError(f"{self._places} adapters are of ranks up to {self._rank}, not {ranks}")
        values = (ctypes.c_int64 * len(ranks))(*ranks)
        return abi.AdapterRows(len(table), len(ranks), table.data_ptr(), ctypes.cast(values, ctypes.c_void_p))


def _check(weights: LoRAWeights, linear: PackedLinear) -> None:
    """Raise ValueError for adapters that do not fit their layer."""
    for tensor in (weights.a, weights.b):
        if tensor.dtype != torch.float32 or not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise ValueError(f"adapters are contiguous float32 on the CPU, not {tensor.dtype} on {tensor.device}")
    if weights.b.ndim != 3 or sum(weights.parts) != linear.outputs or min(weights.parts) < 1:
        raise ValueError(f"adapters {list(weights.b.shape)} of {weights.parts} for {linear.outputs} outputs")
    places, rank, _ = weights.b.shape
    shapes = (places, len(weights.parts) * rank, int(linear.struct.k)), (places, rank, linear.outputs)
    if (weights.a.shape, weights.b.shape) != shapes or rank < 1:
        raise ValueError(f"adapters {list(weights.a.shape)} and {list(weights.b.shape)}, not {shapes}")
