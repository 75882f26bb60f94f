"""SIGKILL during chats: the parts of a stream other than text continue at the same place, too."""

import asyncio
import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.chaos.parts import Parts, assert_nothing_is_left

ALIKE = 0.005
"""Allowed difference of log-probabilities of the same tokens in batches of other sizes."""
TEXT = {"type": "string", "minLength": 120, "maxLength": 200}
NOTE = {
    "type": "function",
    "function": {
        "name": "note",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"text": TEXT},
            "required": ["text"],
            "additionalProperties": False,
        },
    },
}
LIST = {
    "type": "object",
    "properties": {"lines": {"type": "array", "items": {"type": "string"}, "minItems": 6}},
    "required": ["lines"],
    "additionalProperties": False,
}
FORMS: tuple[dict[str, Any], ...] = (
    {"tools": [NOTE], "tool_choice": "required"},
    {"tools": [NOTE], "tool_choice": {"type": "function", "function": {"name": "note"}}, "parallel_tool_calls": False},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "lines", "strict": True, "schema": LIST}}},
    {"n": 2, "extra_body": {"ignore_eos": True}},
)

Told = dict[int, dict[str, Any]]
"""By choice: text, name and arguments of its calls, scored tokens, finish reasons."""
Scores = dict[int, list[float]]
"""By choice: the log-probabilities of every token, and of the top alternatives."""


def chats() -> Iterator[dict[str, Any]]:
    """Yield every form, greedy and sampled."""
    for number, form in enumerate(FORMS * 2):
        yield {
            "messages": [{"role": "user", "content": f"{number}. Tell me about schedulers and pages."}],
            "temperature": 0.0 if number < len(FORMS) else 1.0,
            "seed": number,
            "max_tokens": 150,
            "logprobs": True,
            "top_logprobs": 3,
            **form,
        }


class Chats:
    """All chats at once, with the number of events so far."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/v1"
        self.events = 0

    async def run(self) -> list[tuple[Told, Scores, tuple[int, int]]]:
        """Return the result of each, its scores, and its counts of prompt and completion tokens."""
        self.events = 0
        async with AsyncOpenAI(
            base_url=self._url, api_key="any", max_retries=0, timeout=120, _strict_response_validation=True
        ) as client:
            return await asyncio.gather(*(self._one(client, body) for body in chats()))

    async def _one(self, client: AsyncOpenAI, body: dict[str, Any]) -> tuple[Told, Scores, tuple[int, int]]:
        told: Told = {}
        scores: Scores = {}
        counts = 0, 0
        options = {"include_usage": True}
        create: Any = client.chat.completions.create
        stream = await create(model="embedded", stream=True, stream_options=options, **body)
        async for chunk in stream:
            self.events += 1
            if chunk.usage:
                counts = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
            for choice in chunk.choices:
                empty: dict[str, Any] = {"text": "", "calls": {}, "tokens": [], "ends": []}
                _add(told.setdefault(choice.index, empty), scores.setdefault(choice.index, []), choice)
        return told, scores, counts


def _add(told: dict[str, Any], scores: list[float], choice: Any) -> None:
    told["text"] += choice.delta.content or ""
    for call in choice.delta.tool_calls or []:
        name, arguments = told["calls"].get(call.index, ("", ""))
        told["calls"][call.index] = name + (call.function.name or ""), arguments + (call.function.arguments or "")
    for each in (choice.logprobs and choice.logprobs.content) or []:
        told["tokens"].append((each.token, bytes(each.bytes)))
        scores += [each.logprob, *(other.logprob for other in each.top_logprobs)]
    if choice.finish_reason:
        told["ends"].append(choice.finish_reason)


@pytest.mark.parametrize("role", ["scheduler", pytest.param("detokenizer", marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
async def test_calls_formats_and_log_probabilities_are_those_of_an_unbroken_run(
    double: Parts, role: str, seed: int
) -> None:
    running = Chats(double.server.url)
    expected = await running.run()
    moment = random.Random(seed).randrange(
        running.events // 16, running.events // 4
    )  # a client on a busy machine lags behind
    before = await double.resumed()

    async def strike() -> None:
        while running.events < moment:  # noqa: ASYNC110 - the client tells nobody
            await asyncio.sleep(0.005)
        name = double.busiest(role)
        await double.replaced(name, double.signal(name, signal.SIGKILL))

    running.events = 0
    fault = asyncio.create_task(strike())
    told = await running.run()
    await fault
    for (found, scores, counts), (wanted, wanted_scores, wanted_counts) in zip(told, expected, strict=True):
        assert (found, counts) == (wanted, wanted_counts)
        assert scores == {index: pytest.approx(each, abs=ALIKE) for index, each in wanted_scores.items()}
    assert await double.resumed() > before
    assert_nothing_is_left(await double.idle())
