"""Traces of a runner's steps, read as Perfetto does."""

import gzip
import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tercet.protocol.messages.profiles import StartProfileReq, StopProfileReq
from tercet.scheduler.diagnostics import profiler
from tercet.scheduler.diagnostics.profiler import ProfiledRunner

STOP = StopProfileReq(id="stop")


def start(**changes: Any) -> StartProfileReq:
    fields: dict[str, Any] = {"name": "", "steps": 3, "cpu": True, "gpu": False, "stacks": False, "shapes": False}
    return StartProfileReq(id="start", **{**fields, **changes})


class Products:
    """Runner that multiplies matrices in a thread, as an executor with overlap does."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)

    def submit(self, plan: int) -> "Future[torch.Tensor]":
        return self._thread.submit(lambda: torch.ones(plan, plan) @ torch.ones(plan, plan))

    def close(self) -> None:
        self._thread.shutdown()


def events_of(path: str) -> list[dict[str, Any]]:
    deadline = time.monotonic() + 30
    while not Path(path).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with gzip.open(path) as file:
        found: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return found


def names(events: list[dict[str, Any]], name: str) -> int:
    return sum(event.get("name") == name and event.get("ph") == "X" for event in events)


def test_steps_of_all_threads_are_in_the_trace(tmp_path: Path) -> None:
    run: ProfiledRunner[int, torch.Tensor] = ProfiledRunner(Products(), lambda: tmp_path, "scheduler/0")
    run.submit(4).result()
    started = run.answer(start(name="slow", shapes=True))
    assert started.ok
    assert Path(started.message).parent == tmp_path / "profiles"
    assert Path(started.message).name.startswith("slow-scheduler_0-")
    assert not run.answer(start()).ok
    for _ in range(5):
        assert run.submit(4).result().sum() == 64
    events = events_of(started.message)
    assert (names(events, "step"), names(events, "aten::mm")) == (3, 3)
    assert [4, 4] in next(event for event in events if event.get("name") == "aten::mm")["args"]["Input Dims"]
    assert run.answer(STOP).message == started.message
    assert Path(started.message).stat().st_mode & 0o077 == 0
    assert [path.name for path in (tmp_path / "profiles").glob("*.gz")] == [Path(started.message).name]
    run.close()


def test_a_profile_ends_when_it_is_stopped_or_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run: ProfiledRunner[int, torch.Tensor] = ProfiledRunner(Products(), lambda: tmp_path, "scheduler-0")
    assert not run.answer(STOP).ok
    started = run.answer(start())
    run.submit(4).result()
    assert run.answer(STOP).message == started.message
    assert names(events_of(started.message), "step") == 1
    monkeypatch.setattr(profiler, "_MOST_SECONDS", 0.0)
    late = run.answer(start(name="late"))
    run.submit(4).result()
    assert names(events_of(late.message), "step") == 0
    run.close()


def test_traces_are_bounded_in_size_and_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run: ProfiledRunner[int, torch.Tensor] = ProfiledRunner(Products(), lambda: tmp_path, "scheduler-0")
    monkeypatch.setattr(profiler, "_MOST_FILES", 2)
    paths = []
    for name in "abc":
        paths.append(run.answer(start(name=name)).message)
        run.answer(STOP)
        events_of(paths[-1])
    deadline = time.monotonic() + 10
    while Path(paths[0]).exists():
        assert time.monotonic() < deadline
    assert Path(paths[2]).exists()
    monkeypatch.setattr(profiler, "_MOST_BYTES", 10)
    large = run.answer(start(name="large")).message
    run.answer(STOP)
    while "profile fewer steps" not in caplog.text:
        assert time.monotonic() < deadline + 10
    assert not Path(large).exists()
    run.close()


def test_a_refusal_is_the_reply_to_every_request(tmp_path: Path) -> None:
    run: ProfiledRunner[int, torch.Tensor] = ProfiledRunner(Products(), lambda: tmp_path, "scheduler-0", "no torch")
    assert [run.answer(start()).message, run.answer(STOP).message] == ["no torch"] * 2
    assert not run.answer(STOP).ok
    run.close()
