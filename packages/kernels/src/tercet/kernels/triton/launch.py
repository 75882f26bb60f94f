"""What every launch needs to know: block sizes are powers of two, and how wide the machine is."""

from functools import cache

import torch

_INTERPRETED = 32
"""Multiprocessors that the interpreter plays."""


def power_of_two(least: int) -> int:
    """The smallest power of two that is at least `least`, and at least 1."""
    return 1 << max(0, least - 1).bit_length()


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs a device runs side by side, at least."""
    if device.type != "cuda":
        return _INTERPRETED
    return torch.cuda.get_device_properties(device).multi_processor_count
