"""The numbers of a step that the host decides, on their way to the device: many arrays, one copy."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from tercet.kernels.pinned import pinned_empty

Array = np.ndarray[tuple[int, ...], np.dtype[Any]]

_ALIGNMENT = 16
"""Bytes to which arrays are aligned: for other memory Triton would compile its kernels again, while serving."""


def pack_into(staged: torch.Tensor, arrays: Sequence[Array]) -> None:
    """Write arrays into bytes, each where `starts` says."""
    memory = staged.numpy()
    for array, first in zip(arrays, starts(arrays), strict=False):
        begin = first // array.itemsize
        memory.view(array.dtype)[begin : begin + array.size] = array.ravel()


def unpack(packed: torch.Tensor, arrays: Sequence[Array]) -> list[torch.Tensor]:
    """Views into packed bytes, wherever they are now, of the arrays' types and shapes."""
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
    """Where each array begins, and where the last one ends."""
    places = [0]
    for array in arrays:
        places.append(places[-1] + -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT)
    return places


class HostToDevice:
    """Sends arrays to one device.

    From pinned memory where there is some, so that the host does not wait for the copy. torch gives out a piece of
    pinned memory again only when the copies from it have been made: steps in flight never write over each other's
    numbers.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def send(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        """The arrays as tensors on the device, parts of one buffer; on a CPU they are the arrays themselves."""
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        staged = pinned_empty((starts(arrays)[-1],), torch.uint8, self._device)
        pack_into(staged, arrays)
        return unpack(staged.to(self._device, non_blocking=True), arrays)

    def stage(self, count: int) -> torch.Tensor:
        """int64 [count] on the host, to be written and then copied to the device without waiting."""
        return pinned_empty((count,), torch.int64, self._device)
