"""The values of stored tensors, in float32."""

import mmap
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from tercet.scheduler.gguf.blocks import BlockMatrix, block_matrix
from tercet.scheduler.gguf.gguf_paths import GGUFError
from tercet.scheduler.gguf.gguf_tensors import CheckpointTensor, Piece

_PLAIN = {"F32": "<f4", "F16": "<f2", "F64": "<f8"}
_INTEGERS = ("I8", "I16", "I32", "I64")


def float_values(data: mmap.mmap, kind: str, shape: tuple[int, ...], start: int, end: int) -> npt.NDArray[np.float32]:
    """Return the values of the blocks of type `kind` between two byte offsets, in memory of their own."""
    if kind in _INTEGERS:
        raise GGUFError(f"weights of type {kind} are not supported")
    raw = _bytes(data, start, end)
    if kind in _PLAIN:
        return raw.view(_PLAIN[kind]).reshape(shape).astype(np.float32)
    try:
        values = dequantize(raw.reshape(*shape[:-1], -1), GGMLQuantizationType[kind])
    except NotImplementedError:
        raise GGUFError(f"weights of type {kind} are not supported") from None
    return np.ascontiguousarray(values.reshape(shape), np.float32)


def _bytes(data: mmap.mmap, start: int, end: int) -> npt.NDArray[np.uint8]:
    """Copy a range of bytes, so that no view keeps the mapping open."""
    return np.frombuffer(data[start:end], np.uint8)


class GGUFValues:
    """The checkpoint tensors of one mapped file."""

    def __init__(self, data: mmap.mmap, tensors: Mapping[str, CheckpointTensor]) -> None:
        self._data = data
        self._tensors = tensors

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return a tensor's values, in float32 except for bytes of blocks and scales."""
        tensor = self._tensors[name]
        read = self._raw if tensor.raw else self._floats
        return np.ascontiguousarray(tensor.make([read(piece) for piece in tensor.pieces])).reshape(tensor.shape)

    def blocks(self, name: str) -> BlockMatrix | None:
        """Return a matrix in few bits; None for other tensors, and for those that are more than rows in an order."""
        tensor = self._tensors[name]
        if tensor.raw or len(tensor.pieces) != 1 or len(tensor.shape) != 2 or tensor.changes_values:
            return None
        piece = tensor.pieces[0]
        stored = _bytes(self._data, piece.start, piece.end).reshape(tensor.shape[0], -1)
        return block_matrix(piece.type, np.ascontiguousarray(tensor.make([stored])))

    def _floats(self, piece: Piece) -> npt.NDArray[np.float32]:
        return float_values(self._data, piece.type, piece.shape, piece.start, piece.end)

    def _raw(self, piece: Piece) -> npt.NDArray[np.uint8]:
        return _bytes(self._data, piece.start, piece.end)
