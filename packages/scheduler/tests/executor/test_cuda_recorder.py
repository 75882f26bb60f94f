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


@pytest.mark.parametrize("good", [0, 1, 2])
def test_steps_wait_for_what_a_recording_launched_also_where_it_fails(
    good: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    current, side = Stream(), Stream()
    monkeypatch.setattr("torch.cuda.graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr("torch.cuda.Stream", lambda: side)
    monkeypatch.setattr("torch.cuda.current_stream", lambda: current)
    monkeypatch.setattr("torch.cuda.stream", nullcontext)
    monkeypatch.setattr("torch.cuda.CUDAGraph", Recording)
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
