from typing import Any

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


def test_a_pipeline_has_a_step_for_each_stage_and_no_draft_tokens() -> None:
    for gpu in (False, True):
        assert ScheduleOptions().steps_ahead(gpu=gpu, stages=4) == 4
        assert ScheduleOptions().draft_rows(stages=4) == 0
    ScheduleOptions().check_stages(4)


def test_draft_tokens_must_pay_on_a_gpu_unless_the_option_is_given() -> None:
    default, explicit = ScheduleOptions(), ScheduleOptions(speculative_tokens=4)
    assert (default.draft_rows(), explicit.draft_rows()) == (8, 4)
    assert [default.draft_by_cost(gpu=gpu) for gpu in (False, True)] == [False, True]
    assert not explicit.draft_by_cost(gpu=True)


@pytest.mark.parametrize(
    ("schedule", "flag"),
    [
        (ScheduleOptions(speculative_tokens=4), "--speculative-tokens"),
        (ScheduleOptions(overlap=0), "--overlap"),
    ],
)
def test_options_that_do_not_work_with_stages_are_refused(schedule: ScheduleOptions, flag: str) -> None:
    with pytest.raises(ConfigError, match=f"--pipeline-parallel-size 2 does not work with {flag}: leave it out"):
        schedule.check_stages(2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pipeline_parallel_size": 0}, "--pipeline-parallel-size must be 1 to 64, not 0"),
        ({"tensor_parallel_size": 16, "pipeline_parallel_size": 8}, "are more than 64 processes"),
        (
            {"pipeline_parallel_size": 2, "executor": "fake"},
            "--pipeline-parallel-size 2: the fake executor has nothing",
        ),
    ],
)
def test_splits_that_cannot_work_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ModelOptions(**options)
