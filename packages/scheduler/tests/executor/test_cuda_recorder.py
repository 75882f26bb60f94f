"""In which order streams wait for each other around a recording, without CUDA."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tercet.scheduler.executor.cuda_graphs import CudaRecorder


class Stream:
    """As CUDA's, but it only remembers for whom it waited."""

    def __init__(self) -> None:
        self.waited: list[Stream] = []

    def wait_stream(self, other: "Stream") -> None:
        self.waited.append(other)


class Recording:
    """A graph without CUDA."""

    def capture_begin(self, **_: Any) -> None: ...

    def capture_end(self) -> None: ...

    def replay(self) -> None: ...


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> tuple[Stream, Stream]:
    """The current one, and that on which is recorded."""
    current, side = Stream(), Stream()
    monkeypatch.setattr("torch.cuda.graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr("torch.cuda.Stream", lambda: side)
    monkeypatch.setattr("torch.cuda.current_stream", lambda: current)
    monkeypatch.setattr("torch.cuda.stream", nullcontext)
    monkeypatch.setattr("torch.cuda.CUDAGraph", Recording)
    return current, side


@pytest.mark.parametrize("good", [0, 1, 2])
def test_steps_wait_for_what_a_recording_launched_also_where_it_fails(
    good: int, streams: tuple[Stream, Stream]
) -> None:
    current, side = streams
    answers = iter([torch.zeros(1)] * good)

    def run() -> torch.Tensor:
        assert side.waited == [current], "what steps wrote is there"
        assert not current.waited
        answer = next(answers, None)
        if answer is None:
            raise torch.OutOfMemoryError
        return answer

    with nullcontext() if good == 2 else pytest.raises(torch.OutOfMemoryError):
        CudaRecorder().record(run)
    assert current.waited == [side]


@pytest.mark.parametrize("wary", [False, True])
@pytest.mark.usefixtures("streams")
def test_what_waits_for_the_device_is_refused_before_it_is_recorded(
    wary: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whoever is wary, and the device is as it was afterwards."""
    mode: list[str | int] = [0]
    begun: list[Recording] = []
    monkeypatch.setattr("torch.cuda.get_sync_debug_mode", lambda: mode[-1])
    monkeypatch.setattr("torch.cuda.set_sync_debug_mode", mode.append)
    monkeypatch.setattr(Recording, "capture_begin", lambda self, **_: begun.append(self))

    def run() -> torch.Tensor:
        if mode[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return torch.zeros(1)

    with pytest.raises(RuntimeError, match="synchronizing") if wary else nullcontext():
        CudaRecorder(wary=wary).record(run)
    assert len(begun) == (not wary)
    assert mode == ([0, "error", 0] if wary else [0])
