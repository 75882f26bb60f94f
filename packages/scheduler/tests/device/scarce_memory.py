"""Memory of the host, of which none can be pinned."""

from typing import Any

import pytest
import torch


def take_memory(monkeypatch: pytest.MonkeyPatch, *, scarce: bool) -> list[bool]:
    """Have torch take it here, unless it is pinned and `scarce`. Gives whether it was to be pinned, each time."""
    empty = torch.empty
    pinned: list[bool] = []

    def taken(*size: Any, pin_memory: bool = False, **how: Any) -> torch.Tensor:
        pinned.append(pin_memory)
        if scarce and pin_memory:
            raise torch.AcceleratorError("CUDA error: out of memory")
        return empty(*size, **how)

    monkeypatch.setattr(torch, "empty", taken)
    return pinned
