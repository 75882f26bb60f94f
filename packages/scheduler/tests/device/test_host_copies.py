"""How what a step leaves comes to the host, from a GPU that is not there."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from packages.scheduler.tests.device.scarce_memory import take_memory
from tercet.scheduler.device import host_copies
from tercet.scheduler.device.host_copies import start_copies


class Stream:
    """Of a GPU, on which everything is done at once."""

    def wait_stream(self, _: "Stream") -> None: ...


class Event:
    """What has happened."""

    def __init__(self, device: torch.device) -> None: ...

    def record(self) -> None: ...


class OnGPU(torch.Tensor):
    """A tensor that says of itself who reads it."""

    readers: Any = None

    def record_stream(self, s: Any) -> None:
        self.readers = s


@pytest.mark.parametrize("scarce", [False, True])
def test_copies_come_to_any_memory_where_none_can_be_pinned(scarce: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, pinned = Stream(), take_memory(monkeypatch, scarce=scarce)

    def to(self: torch.Tensor, *_: Any, non_blocking: bool) -> torch.Tensor:
        """As torch has it: into pinned memory."""
        return torch.empty(self.shape, dtype=self.dtype, pin_memory=non_blocking).copy_(self)

    monkeypatch.setattr(host_copies, "_copy_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.Tensor, "to", to)
    left = [torch.tensor([3, -1]).as_subclass(OnGPU), torch.rand(4, 5)[:, :2].as_subclass(OnGPU)]
    copies, copied = start_copies(left, torch.device("cuda"))
    assert isinstance(copied, Event)
    assert pinned.count(True) == 2
    for tensor, copy in zip(left, copies, strict=True):
        assert torch.equal(copy, tensor.as_subclass(torch.Tensor))
        assert copy.dtype == tensor.dtype
        assert copy.data_ptr() != tensor.data_ptr()
        assert tensor.readers is stream


def test_what_is_on_the_host_is_not_copied() -> None:
    left = [torch.tensor([3, -1])]
    copies, copied = start_copies(left, torch.device("cpu"))
    assert copied is None
    assert copies[0] is left[0]
