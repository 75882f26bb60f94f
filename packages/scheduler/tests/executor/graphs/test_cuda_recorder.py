"""In which order streams wait for each other around a recording, without CUDA."""

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, ClassVar
from weakref import finalize

import pytest
import torch

from tercet.scheduler.executor.graphs.cuda_graphs import CudaRecorder, _recording_stream


class Stream:
    """As CUDA's, but it only remembers for whom it waited."""

    def __init__(self) -> None:
        self.waited: list[Stream] = []

    def wait_stream(self, other: "Stream") -> None:
        self.waited.append(other)


class Recording:
    """A graph without CUDA. Its pool is as torch's: it is no more, for good, when all graphs in it are gone."""

    pools: ClassVar[dict[int, int]] = {}
    """How many graphs each of them has."""
    open: ClassVar[list[int]] = []
    """Those that memory is taken from: torch's allocator is recording."""
    pinned: ClassVar[list[int]] = []
    """Those that pinned memory is taken from: that allocator is recording, and only a recording that ends ends it."""
    broken: ClassVar[bool] = False
    """Whether the device breaks recordings off."""
    refused: ClassVar[bool] = False
    """Whether the device begins none."""

    def capture_begin(self, pool: int, **_: Any) -> None:
        self._pool = pool
        if self.pools.get(pool) == 0:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        self.pools[pool] = self.pools.get(pool, 0) + 1
        self.open.append(pool)
        if pool in self.pinned:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.pinned.append(pool)
        if self.refused:
            raise RuntimeError("CUDA error: operation not permitted")

    def capture_end(self) -> None:
        if self.broken or self.refused:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self.end(0, self._pool)
        self.pinned.remove(self._pool)
        finalize(self, self._release, 0, self._pool)

    @classmethod
    def end(cls, device: int, pool: int) -> None:
        """As torch's allocator does."""
        assert device == 0
        if pool not in cls.open:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        cls.open.remove(pool)

    def pool(self) -> int:
        return self._pool

    def replay(self) -> None: ...

    @classmethod
    def _release(cls, device: int, pool: int) -> None:
        assert device == 0
        cls.pools[pool] -= 1


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Stream, Stream]]:
    """The current one, and that on which is recorded."""
    current, side = Stream(), Stream()
    monkeypatch.setattr(Recording, "pools", {})
    monkeypatch.setattr(Recording, "open", [])
    monkeypatch.setattr(Recording, "pinned", [])
    monkeypatch.setattr("torch.cuda.graph_pool_handle", lambda: len(Recording.pools))
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch._C._cuda_endAllocateToPool", Recording.end)
    monkeypatch.setattr("torch._C._cuda_releasePool", Recording._release)
    monkeypatch.setattr("torch.cuda.Stream", lambda _: side)
    monkeypatch.setattr("torch.cuda.current_stream", lambda: current)
    monkeypatch.setattr("torch.cuda.stream", nullcontext)
    monkeypatch.setattr("torch.cuda.CUDAGraph", Recording)
    _recording_stream.cache_clear()
    yield current, side
    _recording_stream.cache_clear()


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


@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize("dropped", [False, True])
def test_after_a_first_recording_without_memory_others_share_a_pool(dropped: bool) -> None:
    """Also after one that was recorded, but that another process had no memory for."""
    recorder = CudaRecorder()
    answers = iter([torch.zeros(1)] * (2 if dropped else 1))

    def first() -> torch.Tensor:
        answer = next(answers, None)
        if answer is None:
            raise torch.OutOfMemoryError
        return answer

    with nullcontext() if dropped else pytest.raises(torch.OutOfMemoryError):
        recorder.record(first)
    gc.collect()
    kept = [recorder.record(lambda: torch.zeros(1)) for _ in range(3)]
    assert max(Recording.pools.values()) >= len(kept)


@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize("shared", [False, True])
def test_torch_takes_no_memory_for_a_recording_that_was_broken_off(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those after it are recordings like any other, in a pool of their own: pinned memory takes none into its."""
    recorder = CudaRecorder()
    kept = [recorder.record(lambda: torch.zeros(1))] if shared else []
    monkeypatch.setattr(Recording, "broken", True)
    with pytest.raises(RuntimeError, match="previous error during capture"):
        recorder.record(lambda: torch.zeros(1))
    assert Recording.open == []
    assert [*Recording.pools.values()] == [len(kept)]
    monkeypatch.setattr(Recording, "broken", False)
    kept += [recorder.record(lambda: torch.zeros(1)) for _ in range(2)]
    assert Recording.open == []
    assert [*Recording.pools.values()] == [len(kept) - 2, 2]


@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize("shared", [False, True])
def test_torch_takes_no_memory_for_a_recording_that_never_began(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = CudaRecorder()
    kept = [recorder.record(lambda: torch.zeros(1))] if shared else []
    monkeypatch.setattr(Recording, "refused", True)
    with pytest.raises(RuntimeError, match="not permitted"):
        recorder.record(lambda: torch.zeros(1))
    assert Recording.open == []
    assert [*Recording.pools.values()] == [len(kept)]


@pytest.mark.usefixtures("streams")
def test_recorders_of_models_one_after_another_record_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that cuBLAS meets takes memory, which nobody gives back."""
    made: list[Stream] = []

    def stream(_: int) -> Stream:
        made.append(Stream())
        return made[-1]

    monkeypatch.setattr("torch.cuda.Stream", stream)
    for _ in range(3):
        CudaRecorder().record(lambda: torch.zeros(1))
    assert len(made) == 1


@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize("broken", [False, True])
def test_what_went_wrong_first_is_what_is_told(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there was no memory smaller graphs are recorded, whatever became of that recording."""
    monkeypatch.setattr(Recording, "broken", broken)
    answers = iter([torch.zeros(1)])

    def run() -> torch.Tensor:
        answer = next(answers, None)
        if answer is None:
            raise torch.OutOfMemoryError
        return answer

    with pytest.raises(torch.OutOfMemoryError):
        CudaRecorder().record(run)
    assert Recording.open == []


@pytest.mark.parametrize("check_sync", [False, True])
@pytest.mark.usefixtures("streams")
def test_what_waits_for_the_device_is_refused_before_it_is_recorded(
    check_sync: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whoever is wary, and the device is as it was afterwards."""
    mode: list[str | int] = [0]
    begun: list[Recording] = []
    monkeypatch.setattr("torch.cuda.get_sync_debug_mode", lambda: mode[-1])
    monkeypatch.setattr("torch.cuda.set_sync_debug_mode", mode.append)
    monkeypatch.setattr(Recording, "capture_begin", lambda self, **_: begun.append(self))
    monkeypatch.setattr(Recording, "capture_end", lambda _: None)

    def run() -> torch.Tensor:
        if mode[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return torch.zeros(1)

    with pytest.raises(RuntimeError, match="synchronizing") if check_sync else nullcontext():
        CudaRecorder(check_sync=check_sync).record(run)
    assert len(begun) == (not check_sync)
    assert mode == ([0, "error", 0] if check_sync else [0])
