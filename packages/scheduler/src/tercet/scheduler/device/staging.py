"""Transfers of a step's integers from host to device: many arrays, one copy."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from tercet.kernels.pinned import pinned_empty

Array = np.ndarray[tuple[int, ...], np.dtype[Any]]

_ALIGNMENT = 16
"""Alignment of arrays in bytes: for other alignments Triton would compile its kernels again, while serving."""


def pack_into(staged: torch.Tensor, arrays: Sequence[Array]) -> None:
    """Write arrays into a byte tensor at the offsets that `starts` gives."""
    memory = staged.numpy()
    for array, first in zip(arrays, starts(arrays), strict=False):
        begin = first // array.itemsize
        memory.view(array.dtype)[begin : begin + array.size] = array.ravel()


def unpack(packed: torch.Tensor, arrays: Sequence[Array]) -> list[torch.Tensor]:
    """Return views into packed bytes, on any device, with the arrays' types and shapes."""
    wholes = {dtype: packed.view(_dtype_of(dtype)) for dtype in {array.dtype for array in arrays}}
    views = []
    for array, first in zip(arrays, starts(arrays), strict=False):
        begin = first // array.itemsize
        flat = wholes[array.dtype][begin : begin + array.size]
        views.append(flat if array.ndim == 1 else flat.view(array.shape))
    return views


@cache
def _dtype_of(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def starts(arrays: Sequence[Array]) -> list[int]:
    """Return the offset of each array and the total size."""
    places = [0]
    for array in arrays:
        places.append(places[-1] + -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT)
    return places


class HostToDevice:
    """A sender of arrays to one device.

    Arrays go through pinned memory if possible, so that the host does not wait for the copy. torch reuses pinned memory
    only after the copies from it are done, so steps in flight never overwrite each other's numbers.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def send(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        """Return the arrays as tensors on the device, parts of one buffer; on a CPU they share the arrays' memory."""
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        staged = pinned_empty((starts(arrays)[-1],), torch.uint8, self._device)
        pack_into(staged, arrays)
        return unpack(staged.to(self._device, non_blocking=True), arrays)

    def stage(self, count: int) -> torch.Tensor:
        """Return int64 [count] on the host, to be written and then copied to the device without waiting."""
        return pinned_empty((count,), torch.int64, self._device)
