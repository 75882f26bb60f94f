"""Log lines of requests: fields, levels, the share, and slow requests."""

import json
import logging
from collections.abc import Callable
from typing import Any, Literal

import pytest

from tercet.frontend.config.config import TelemetryOptions
from tercet.frontend.manager.request import GenerateRequest, GenerationOptions
from tercet.frontend.manager.request_log import SHORT, RequestLog
from tercet.frontend.manager.tokenizer_manager import TokenizerManager
from tercet.frontend.model.prompts import ChatPrompt, Prompt, TextPrompt
from tercet.frontend.testing import FakeEngine, Token, managed, submit
from tercet.protocol.messages.messages import TokenizedGenerateReqInput
from tercet.protocol.messages.values import Grammar, GrammarKind, ModelLimits
from tercet.protocol.system.log_lines import JsonFormatter, LogSettings

EngineOf = Callable[..., FakeEngine]
SECRET = "the quick brown fox"
OPTIONS = GenerationOptions(max_tokens=4, sampling={"temperature": 0.5}, n=2)


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def answer(request: TokenizedGenerateReqInput, index: int) -> list[Token]:
    return [Token(40 + index, "x"), Token(50, "y")]


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Return the lines as `--log-format json` writes them."""
    formatter = JsonFormatter(LogSettings(0, "json", "frontend-0"))
    return [json.loads(formatter.format(each)) for each in caplog.records if each.name.endswith("request_log")]


async def logged(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture, options: TelemetryOptions, *requests: GenerateRequest
) -> list[dict[str, Any]]:
    """Run requests to their ends; return the lines about them."""
    clock = Clock()

    async def run(manager: TokenizerManager, request: GenerateRequest) -> None:
        generation = await manager.submit([request])
        clock.now += 1
        engine.step()
        engine.step()
        clock.now += 1
        manager.release(generation)
        manager.release(generation)

    with caplog.at_level(logging.INFO):
        async with managed(engine, clock=clock, reports=[RequestLog(options).report]) as manager:
            for request in requests:
                await run(manager, request)
    return lines(caplog)


def request(prompt: Prompt = TextPrompt(SECRET), options: GenerationOptions = OPTIONS, **more: Any) -> GenerateRequest:
    return GenerateRequest(model="tiny", prompt=prompt, options=options, **more)


async def test_level_0_logs_metadata_and_no_text(engine_of: EngineOf, caplog: pytest.LogCaptureFixture) -> None:
    [line] = await logged(engine_of(answer), caplog, TelemetryOptions(log_requests=True), request())
    expected = {
        "level": "INFO",
        "model": "tiny",
        "outcome": "finished",
        "output_tokens": 4,
        "dispatches": 1,
        "scheduler": "scheduler-0",
        "tokenize_seconds": 0.0,
        "queue_seconds": 0.02,
        "first_token_seconds": 1.0,
        "seconds": 2.0,
        "finish_reasons": "stop,stop",
    }
    assert {name: line[name] for name in expected} == expected
    assert not {"sampling", "input", "output"} & set(line)
    assert not any(word in json.dumps(line) for word in SECRET.split())


async def test_each_level_adds_to_the_one_below(engine_of: EngineOf, caplog: pytest.LogCaptureFixture) -> None:
    long = ChatPrompt(messages=[{"role": "user", "content": f"level=ERROR {'z' * 2 * SHORT}"}])
    asked = request(TextPrompt(SECRET), grammar=Grammar(GrammarKind.REGEX, SECRET))
    found = []
    levels: tuple[Literal[1, 2, 3], ...] = (1, 2, 3)
    for level in levels:
        caplog.clear()
        options = TelemetryOptions(log_requests=True, log_requests_level=level)
        found.append(await logged(engine_of(answer), caplog, options, asked))
    tokenizer_text = json.loads(found[2][0]["output"])
    for [line] in found:
        assert json.loads(line["sampling"]).items() >= {"temperature": 0.5, "n": 2, "grammar": "regex"}.items()
    assert ["input" in line for [line] in found] == [False, True, True]
    assert json.loads(found[2][0]["input"]) == SECRET
    assert len(tokenizer_text) == 2
    assert all(tokenizer_text)
    caplog.clear()
    shown = []
    for level in levels[1:]:
        options = TelemetryOptions(log_requests=True, log_requests_level=level)
        engine = engine_of(answer, limits=_long(engine_of().limits))
        shown += await logged(engine, caplog, options, request(long))
        caplog.clear()
    assert [len(line["input"]) for line in shown] == [SHORT, len(json.dumps(long.messages, separators=(",", ":")))]
    assert {line["level"] for line in shown} == {"INFO"}


def _long(limits: ModelLimits) -> ModelLimits:
    return ModelLimits(model=limits.model, context_length=9999, vocab_size=limits.vocab_size, max_total_tokens=9999)


async def test_a_share_of_the_requests_is_logged(engine_of: EngineOf, caplog: pytest.LogCaptureFixture) -> None:
    draws = iter([0.1, 0.25, 0.9, 0.0])
    options = TelemetryOptions(log_requests=True, log_requests_share=0.25)
    log = RequestLog(options, chance=lambda: next(draws))
    engine = engine_of(answer)
    with caplog.at_level(logging.INFO):
        async with managed(engine, reports=[log.report]) as manager:
            for length in range(1, 5):
                manager.release(await submit(manager, prompt=length))
    assert [(line["prompt_tokens"], line["outcome"]) for line in lines(caplog)] == [
        (1, "client_gone"),
        (4, "client_gone"),
    ]


@pytest.mark.parametrize(("seconds", "expected"), [(2.0, ["WARNING"]), (2.1, [])])
async def test_slow_requests_are_warnings(
    engine_of: EngineOf, caplog: pytest.LogCaptureFixture, seconds: float, expected: list[str]
) -> None:
    found = await logged(engine_of(answer), caplog, TelemetryOptions(slow_request_seconds=seconds), request())
    assert [line["level"] for line in found] == expected
    assert not any("input" in line for line in found)


async def test_a_redispatch_shows_in_the_line(engine_of: EngineOf, caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(answer, schedulers=["scheduler-0", "scheduler-1"])
    log = RequestLog(TelemetryOptions(log_requests=True))
    with caplog.at_level(logging.INFO):
        async with managed(engine, reports=[log.report]) as manager:
            generation = await submit(manager)
            engine.down("scheduler-0")
            engine.step()
            engine.step()
            manager.release(generation)
    [line] = lines(caplog)
    assert (line["dispatches"], line["scheduler"], line["outcome"]) == (2, "scheduler-1", "finished")
    [state] = generation.states
    assert [(each.scheduler, each.cause) for each in state.dispatches] == [
        ("scheduler-0", ""),
        ("scheduler-1", "scheduler_died"),
    ]


def test_options_without_use_are_refused() -> None:
    with pytest.raises(ValueError, match="without --log-requests"):
        TelemetryOptions(log_requests_level=2)
