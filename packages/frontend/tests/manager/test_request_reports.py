"""Reports of ended requests: failures, bounds, and the cost without reports."""

import asyncio
import logging
from collections.abc import Callable

import pytest

from tercet.frontend.http.loop_turns import LoopTurns
from tercet.frontend.manager import request_reports
from tercet.frontend.manager.request_reports import EndedRequest
from tercet.frontend.testing import FakeEngine, managed, submit

EngineOf = Callable[..., FakeEngine]


async def fail(_: EndedRequest, __: LoopTurns) -> None:
    raise RuntimeError("no disk")


async def test_a_report_that_fails_is_counted_and_logged_once_a_minute(
    engine_of: EngineOf, caplog: pytest.LogCaptureFixture
) -> None:
    found: list[str] = []

    async def keep(ended: EndedRequest, _: LoopTurns) -> None:
        found.extend(each.rid for each in ended.states)

    async with managed(engine_of(), reports=[fail, keep]) as manager:
        for _ in range(3):
            manager.release(await submit(manager))
        await manager.requests.reports.close()
        assert manager.series().samples["telemetry_failures"][0].value == 3
        assert manager.counters.outcomes.total() == 3
    assert len(found) == 3
    [line] = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert line == "request reports: failed: error=RuntimeError('no disk')"


async def test_reports_that_wait_are_bounded(engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_reports, "MOST_RUNNING", 2)
    go = asyncio.Event()
    found: list[EndedRequest] = []

    async def wait(ended: EndedRequest, _: LoopTurns) -> None:
        await go.wait()
        found.append(ended)

    async with managed(engine_of(), reports=[wait]) as manager:
        for _ in range(3):
            manager.release(await submit(manager))
        assert manager.counters.telemetry_failures.total == 1
        go.set()
    assert len(found) == 2


async def test_without_reports_the_end_of_a_request_starts_nothing(engine_of: EngineOf) -> None:
    def clock() -> float:
        raise AssertionError

    async with managed(engine_of()) as manager:
        generation = await submit(manager)
        before = asyncio.all_tasks()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(manager.requests, "clock", clock)
            manager.release(generation)
        assert asyncio.all_tasks() == before
