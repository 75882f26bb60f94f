"""What processes do together they do alike, whatever one of them has no memory for."""

from collections.abc import Callable

import pytest
import torch

from tercet.scheduler.device.oom import NoSplit, SplitOnOom, lacks_memory, release_cached
from tercet.scheduler.executor.rank_strategy import SOLO, JointRecorder, RankError, rank_strategy_of
from tercet.scheduler.models.layers.shard import WHOLE, Shard, SingleRankCollectives

CANNOT, LACKS_MEMORY, RECORDED = range(3)
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory")
NOT_PERMITTED = RuntimeError("not permitted when stream is capturing")


class Others(SingleRankCollectives):
    """Processes of which the one that came least far says so; rank 0 among them says 7."""

    def __init__(self, outcome: int = RECORDED) -> None:
        self.outcome = outcome
        self.asked: list[int] = []

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return torch.full_like(x, 7)

    def all_reduce_min(self, number: int) -> int:
        self.asked.append(number)
        return min(number, self.outcome)


class Device:
    """A `Recorder` that runs what it records once before, and may fail after that, or when it is launched."""

    def __init__(self, error: Exception | None = None, *, launched: bool = False) -> None:
        self.error = error
        self.launched = launched
        self.launches = 0

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        output = run()
        if self.error is not None and not self.launched:
            raise self.error
        return self.launch, output

    def launch(self) -> None:
        if self.error is not None:
            raise self.error
        self.launches += 1


def work() -> torch.Tensor:
    return torch.ones(1)


def test_what_all_record_is_recorded() -> None:
    others, device = Others(), Device()
    launch, output = JointRecorder(device, others).record(work)
    assert output == 1
    assert others.asked == [RECORDED]
    assert device.launches == 0, "others may not have recorded it yet"
    launch()
    assert device.launches == 1


@pytest.mark.parametrize(
    ("mine", "theirs", "memory"),
    [
        (None, LACKS_MEMORY, True),
        (None, CANNOT, False),
        (NO_MEMORY, RECORDED, True),
        (NO_MEMORY, LACKS_MEMORY, True),
        (NO_MEMORY, CANNOT, False),
        (NOT_PERMITTED, RECORDED, False),
        (NOT_PERMITTED, LACKS_MEMORY, False),
    ],
)
def test_what_one_cannot_record_none_has(mine: Exception | None, theirs: int, memory: bool) -> None:
    """All go on alike: without this graph where there was no memory for it, without any where they cannot be."""
    with pytest.raises((MemoryError, RuntimeError)) as raised:
        JointRecorder(Device(mine), Others(theirs)).record(work)
    assert lacks_memory(raised.value) is memory


@pytest.mark.parametrize("error", [NO_MEMORY, NOT_PERMITTED])
def test_a_step_that_fails_before_it_is_recorded_is_the_end(error: Exception) -> None:
    """Others are in its collectives: there is nothing to agree on, and no waiting for an answer."""

    def fails() -> torch.Tensor:
        raise error

    others = Others()
    with pytest.raises(RankError) as raised:
        JointRecorder(Device(), others).record(fails)
    assert not isinstance(raised.value, MemoryError | RuntimeError), "which `CudaGraphRunner` survives"
    assert not others.asked


def test_a_launch_that_fails_is_the_end() -> None:
    """Others wait in its collectives; and no step may be left out for want of memory in one process alone."""
    launch, _ = JointRecorder(Device(NO_MEMORY, launched=True), Others()).record(work)
    with pytest.raises(RankError) as raised:
        launch()
    assert not isinstance(raised.value, MemoryError | RuntimeError)


def test_the_conduct_of_several_is_to_try_nothing_alone() -> None:
    strategy = rank_strategy_of(Shard(1, 2, Others()))
    model = torch.nn.Module()
    assert strategy.wrap_model(model, torch.device("cuda"), lambda: None) is model  # type: ignore[arg-type, comparison-overlap]
    assert strategy.wrap_model(model, torch.device("cpu"), lambda: None) is model  # type: ignore[arg-type, comparison-overlap]
    assert isinstance(strategy.oom_policy("rows", release_cached), NoSplit)
    assert isinstance(strategy.wrap_recorder(Device()), JointRecorder)
    assert strategy.agree(torch.tensor([1, 2])).tolist() == [7, 7]


def test_the_conduct_of_one_is_its_own_affair() -> None:
    assert rank_strategy_of(WHOLE) is SOLO
    tokens, device = torch.tensor([1]), Device()
    assert SOLO.agree(tokens) is tokens
    assert SOLO.wrap_recorder(device) is device
    assert isinstance(SOLO.oom_policy("rows", release_cached), SplitOnOom)
