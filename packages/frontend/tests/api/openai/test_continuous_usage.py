"""Token counts in every chunk, which load generators and vLLM's clients request."""

import itertools
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx2
import pytest

from packages.frontend.tests.api.openai.test_chat_reasoning import SAID, TEMPLATE
from packages.frontend.tests.api.openai.tool_chat import EngineOf, HttpOf, saying, tool_engine
from tercet.frontend.testing import FakeEngine, serving
from tercet.protocol.messages.values import ModelLimits

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Why?"}]}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "Why?"}


@pytest.fixture
def thinking(engine_of: EngineOf, files: dict[str, bytes], limits: ModelLimits) -> Callable[[], FakeEngine]:
    return partial(tool_engine, engine_of, files, limits, saying(SAID), template=TEMPLATE)


async def usages(http: httpx2.AsyncClient, path: str, body: dict[str, Any], **options: bool) -> list[dict[str, Any]]:
    """Return the usage of every chunk."""
    answer = await http.post(path, json={**body, "stream": True, "stream_options": options})
    return [json.loads(line[6:]).get("usage") for line in answer.text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/chat/completions", {**CHAT, "n": 2}, [0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 8]),
        ("/v1/completions", TEXT, [1, 2, 3, 4, 4]),
    ],
)
async def test_every_chunk_has_the_counts_so_far(
    engine_of: EngineOf, http_of: HttpOf, path: str, body: Any, expected: list[int]
) -> None:
    async with serving(engine_of()) as served:
        found = await usages(http_of(served), path, body, include_usage=True, continuous_usage_stats=True)
        unasked = await usages(http_of(served), path, body, continuous_usage_stats=True)
    counts = [usage["completion_tokens"] for usage in found]
    assert counts == expected
    assert all(first <= second for first, second in itertools.pairwise(counts))
    assert counts[-1] == 4 * body.get("n", 1)
    assert {usage["total_tokens"] - usage["completion_tokens"] for usage in found} == {found[-1]["prompt_tokens"]}
    assert set(unasked) == {None}


async def test_chunks_of_parsed_answers_have_them_too(thinking: Callable[[], FakeEngine], http_of: HttpOf) -> None:
    async with serving(thinking()) as served:
        options = {"include_usage": True, "continuous_usage_stats": True}
        found = await usages(http_of(served), "/v1/chat/completions", CHAT, **options)
    counts = [usage["completion_tokens"] for usage in found]
    assert counts == sorted(counts)
    assert 0 == counts[0] < counts[1] < counts[-1]
