import pytest

from tercet.scheduler.config import ModelOptions, ScheduleOptions
from tercet.scheduler.found_model import on_gpu


@pytest.mark.parametrize(("gpu", "expected"), [(False, (64, 512, 0)), (True, (256, 8192, 1))])
def test_a_gpu_is_given_more_at_once(gpu: bool, expected: tuple[int, int, int]) -> None:
    schedule = ScheduleOptions()
    assert (schedule.slots(gpu=gpu), schedule.step_tokens(gpu=gpu), schedule.steps_ahead(gpu=gpu)) == expected


@pytest.mark.parametrize("gpu", [False, True])
def test_what_is_asked_for_is_what_is_done(gpu: bool) -> None:
    schedule = ScheduleOptions(max_running_requests=3, chunked_prefill_size=20, overlap=0)
    assert (schedule.slots(gpu=gpu), schedule.step_tokens(gpu=gpu), schedule.steps_ahead(gpu=gpu)) == (3, 20, 0)
    assert ScheduleOptions(overlap=1).steps_ahead(gpu=gpu) == 1


def test_only_what_computes_on_a_gpu_counts_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert on_gpu(ModelOptions())
    assert on_gpu(ModelOptions(device="cuda:1"))
    assert not on_gpu(ModelOptions(device="cpu"))
    assert not on_gpu(ModelOptions(executor="fake"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert not on_gpu(ModelOptions())
