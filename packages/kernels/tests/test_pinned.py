"""What the host's memory is where some can be pinned, and where none can, without a GPU."""

import logging
from functools import partialmethod
from typing import Any

import pytest
import torch

from tercet.kernels import pinned as pinned_module
from tercet.kernels.pinned import pinned, pinned_empty

GPU, CPU = torch.device("cuda"), torch.device("cpu")
LACKS = [
    torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in"),
    torch.OutOfMemoryError("CUDA out of memory."),
    RuntimeError("CUDA error: out of memory"),
]


class Host:
    """Memory of the host, and how often some was pinned; where `error` is set, it is raised instead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: Exception | None = None
        self.pinned = 0
        self._empty = torch.empty
        monkeypatch.setattr(torch, "empty", self.take)
        monkeypatch.setattr(torch.Tensor, "pin_memory", partialmethod(lambda tensor, pin: pin(tensor), self.pin))
        pinned_module._warn_once.cache_clear()

    def take(self, *size: Any, pin_memory: bool = False, **how: Any) -> torch.Tensor:
        made = self._empty(*size, **how)
        return self.pin(made) if pin_memory else made

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        self.pinned += 1
        return tensor.clone()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


@pytest.mark.parametrize(("device", "taken"), [(GPU, 2), (CPU, 0)])
def test_what_goes_to_a_gpu_or_comes_from_there_is_pinned(device: torch.device, taken: int, host: Host) -> None:
    content = torch.tensor([1, 2])
    made, ready = pinned_empty((2, 3), torch.int32, device), pinned(content, device)
    assert (made.shape, made.dtype) == ((2, 3), torch.int32)
    assert ready.tolist() == [1, 2]
    assert (ready is content) == (not taken)
    assert host.pinned == taken


@pytest.mark.parametrize("error", LACKS, ids=lambda error: type(error).__name__)
def test_pageable_memory_replaces_pinned_memory_with_one_log_line(
    error: Exception, host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    host.error, content = error, torch.tensor([1, 2])
    for _ in range(3):  # steps
        made = pinned_empty((2, 3), torch.int32, GPU)
        assert (made.shape, made.dtype) == ((2, 3), torch.int32)
        assert pinned(content, GPU) is content
    assert [(record.levelno, record.name) for record in caplog.records] == [(logging.WARNING, "tercet.kernels.pinned")]
    host.error = None
    pinned(content, GPU)
    assert host.pinned == 1, "which is asked for again"


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: unspecified launch failure"),
    ],
)
def test_a_device_that_has_failed_is_not_taken_for_one_without_memory(
    error: Exception, host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    host.error = error
    with pytest.raises(type(error)) as raised:
        pinned_empty((2,), torch.int32, GPU)
    assert raised.value is error
    with pytest.raises(type(error)):
        pinned(torch.tensor([1]), GPU)
    assert not caplog.records
