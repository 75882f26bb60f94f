import pytest

from tercet.scheduler.config import ConfigError, ModelOptions, ScheduleOptions
from tercet.scheduler.device import devices
from tercet.scheduler.resolved_model import on_gpu


@pytest.mark.parametrize(("gpu", "expected"), [(False, (64, 512, 0)), (True, (256, 8192, 1))])
def test_a_gpu_is_given_more_at_once(gpu: bool, expected: tuple[int, int, int]) -> None:
    schedule = ScheduleOptions()
    assert (schedule.slots(gpu=gpu), schedule.step_tokens(gpu=gpu), schedule.steps_ahead(gpu=gpu)) == expected


@pytest.mark.parametrize("gpu", [False, True])
def test_what_is_asked_for_is_what_is_done(gpu: bool) -> None:
    schedule = ScheduleOptions(max_running_requests=3, chunked_prefill_size=20, overlap=0)
    assert (schedule.slots(gpu=gpu), schedule.step_tokens(gpu=gpu), schedule.steps_ahead(gpu=gpu)) == (3, 20, 0)
    assert ScheduleOptions(overlap=1).steps_ahead(gpu=gpu) == 1


@pytest.mark.usefixtures("other_devices")
def test_only_what_computes_on_a_gpu_counts_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "missing_gpu", lambda _: "")
    assert on_gpu(ModelOptions())
    assert on_gpu(ModelOptions(device="cuda:0"))
    assert not on_gpu(ModelOptions(device="cpu"))
    assert not on_gpu(ModelOptions(executor="fake", device="cuda"))
    devices.first_gpu.cache_clear()
    monkeypatch.setattr(devices, "missing_gpu", lambda _: "the driver is too old")
    assert not on_gpu(ModelOptions())
    with pytest.raises(ConfigError, match=r"^--device cuda: the driver is too old$"):
        on_gpu(ModelOptions(device="cuda"))
