"""`tercet bench serve` against a frontend with a scripted engine behind it."""

import asyncio
import json
from collections.abc import Callable

import pytest

from tercet.frontend.cli.main import main
from tercet.frontend.testing import FakeEngine
from tercet.frontend.testing.serving import serving


async def run(*arguments: str) -> int:
    return await asyncio.to_thread(main, ["bench", "serve", *arguments])


async def test_a_running_server_is_measured(
    engine_of: Callable[..., FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(engine_of()) as served:
        options = ["--url", served.url, "--requests", "3", "--output-tokens", "4", "--input-tokens", "2"]
        plain, as_json = await run("W2", *options), await run("W1", "W2", "--json", *options)
    assert (plain, as_json) == (0, 0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "W2: 3 requests, 8 at a time, 2 tokens in, 4 out"
    found = [json.loads(line) for line in lines if line.startswith("{")]
    assert [one["workload"] for one in found] == ["W1", "W2"]
    assert [(one["requests"], one["failed"], one["short"]) for one in found] == [(3, 0, 0), (3, 0, 0)]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["W9"], "W9 is not one of"),
        (["--url", "http://127.0.0.1:1"], "no server at"),
        (["W1", "--model", "m", "--requests", "0"], "at least one request"),
        (["W1", "--model", "m", "--rate", "0"], "--rate must be above 0"),
        (["W1", "--model", "m", "--tokenizer", "nowhere"], "is not there"),
    ],
)
async def test_what_cannot_be_meant_is_told(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run(*arguments) == 2
    assert why in capsys.readouterr().err
