"""The numbers of a step that the host decides, on their way to the device: many arrays, one copy."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

Array = np.ndarray[tuple[int, ...], np.dtype[Any]]

_ALIGNMENT = 8
"""Bytes: no element is wider."""


def pack_into(staged: torch.Tensor, arrays: Sequence[Array]) -> None:
    """Write arrays into bytes, each where `starts` says."""
    memory = staged.numpy()
    for array, first in zip(arrays, starts(arrays), strict=False):
        memory[first : first + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def unpack(packed: torch.Tensor, arrays: Sequence[Array]) -> list[torch.Tensor]:
    """Views into packed bytes, wherever they are now, of the arrays' types and shapes."""
    return [
        packed[first : first + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for array, first in zip(arrays, starts(arrays), strict=False)
    ]


def starts(arrays: Sequence[Array]) -> list[int]:
    """Where each array begins, and where the last one ends."""
    places = [0]
    for array in arrays:
        places.append(places[-1] + -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT)
    return places


class Uploads:
    """Sends arrays to one device.

    From pinned memory, so that the host does not wait for the copy. torch gives out a piece of pinned memory again
    only when the copies from it have been made: steps in flight never write over each other's numbers.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def send(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        """The arrays as tensors on the device, parts of one buffer; on a CPU they are the arrays themselves."""
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        staged = torch.empty(starts(arrays)[-1], dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        pack_into(staged, arrays)
        return unpack(staged.to(self._device, non_blocking=True), arrays)
