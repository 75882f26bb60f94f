"""Reports of ended requests: failures, bounds, and the cost without reports."""

import asyncio
import logging
from collections.abc import Callable

import pytest

from tercet.frontend.config.config import TelemetryOptions
from tercet.frontend.http.loop_turns import LoopTurns
from tercet.frontend.manager import request_reports
from tercet.frontend.manager.counters import LatencyMeasures
from tercet.frontend.manager.request import GenerateRequest
from tercet.frontend.manager.request_log import RequestLog
from tercet.frontend.manager.request_reports import EndedRequest
from tercet.frontend.model.prompts import TokenPrompt
from tercet.frontend.testing import FakeEngine, managed, submit
from tercet.protocol.messages.messages import FirstTextRow
from tercet.protocol.messages.values import PrefillChunk

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


async def test_the_times_of_a_dispatch_are_those_of_its_first_choice(engine_of: EngineOf) -> None:
    async with managed(engine_of()) as manager:
        generation = await submit(manager, n=2)
        [state] = generation.states
        for tokens in (40, 1):
            chunks = [PrefillChunk(at=0.1, tokens=tokens)]
            opening = FirstTextRow(row=0, prompt_tokens=3, cached_tokens=0, chunks=chunks, detokenize_seconds=tokens)
            LatencyMeasures().observe_first_output(state, 0.1, float(tokens), opening)
        manager.release(generation)
    [dispatch] = state.dispatches
    assert (dispatch.first_output_at, dispatch.detokenize_seconds, dispatch.chunks[0].tokens) == (40.0, 40, 40)


async def test_lines_of_many_prompts_leave_the_event_loop_to_others(
    engine_of: EngineOf, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        async with managed(engine_of(), reports=[RequestLog(TelemetryOptions(log_requests=True)).report]) as manager:
            prompts = [GenerateRequest(model="tiny", prompt=TokenPrompt([1, 2])) for _ in range(64)]
            generation = await manager.submit(prompts)
            manager.release(generation)
            closing = asyncio.create_task(manager.requests.reports.close())
            iterations = 0
            while not closing.done():
                await asyncio.sleep(0)
                iterations += 1
    assert sum(each.name.endswith("request_log") for each in caplog.records) == 64
    assert iterations >= 64
