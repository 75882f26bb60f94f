"""Answers do not depend on other requests, on the cache, or on streaming."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from tercet.scheduler.testing.lora_checkpoints import write_adapter
from tests.e2e.random_checkpoint import REASONING, write
from tests.e2e.request_mix import RESPONSES, Body, Mix, ParsedChoice, parse_answer
from tests.server_process import Server

REQUESTS = 60
VOCABULARY = 350
CROWDED = (
    *("--dtype", "float32", "--kv-cache-bytes", "400KiB", "--page-size", "4", "--chunked-prefill-size", "48"),
    *("--max-running-requests", "10", "--scheduler.overlap", "1", "--detokenizer-workers", "2"),
)


@pytest.fixture(scope="module")
def crowded(start: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server that has to chunk, evict and retract."""
    root = tmp_path_factory.mktemp("mix")
    model = write(root / "tiny", REASONING)
    adapter = write_adapter(root / "adapter", model, size=0.3)
    server = start(str(model), *CROWDED, "--lora", f"adapted={adapter}").wait()
    yield server
    assert server.stop() == 0, "\n".join(server.lines)


def whole(client: httpx2.Client, path: str, body: Body) -> list[Body]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return [answer.json()]


def streamed(client: httpx2.Client, path: str, body: Body) -> list[Body]:
    options = {} if path == RESPONSES else {"stream_options": {"include_usage": True}}
    lines = client.post(path, json={**body, "stream": True, **options}).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def left(client: httpx2.Client, path: str, body: Body) -> None:
    """Disconnect after the first part of the answer."""
    with client.stream("POST", path, json={**body, "stream": True}) as answer:
        next(answer.iter_bytes())


def close(one: dict[Any, ParsedChoice], other: dict[Any, ParsedChoice]) -> bool:
    """Return whether log-probabilities are close: sums of floats depend on the batch."""
    scores = [[each for choice in answer.values() for each in choice.scores] for answer in (one, other)]
    return [0.0 if each is None else each for each in scores[0]] == pytest.approx(
        [0.0 if each is None else each for each in scores[1]], abs=2e-3
    )


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_alone_or_in_a_crowd_streamed_or_not_an_answer_is_the_same(crowded: Server, seed: int) -> None:
    mix = list(Mix(seed, ["tiny", "tiny", "adapted"], VOCABULARY).requests(REQUESTS))
    with httpx2.Client(base_url=crowded.url, timeout=60) as client, ThreadPoolExecutor(24) as crowd:
        ways = [(streamed, whole, whole, streamed, left)[place % 5] for place in range(REQUESTS)]
        asked = [crowd.submit(way, client, path, body) for way, (path, body) in zip(ways, mix, strict=True)]
        found = [each.result() for each in asked]
        crowded.wait_for(lambda load: load["running"] == 0)
        for place, ((path, body), parts) in enumerate(zip(mix, found, strict=True)):
            if parts is None:
                continue
            alone, counts = parse_answer(path, whole(client, path, {**body, "cache_salt": f"nobody {seed} {place}"}))
            choices, counted = parse_answer(path, parts)
            assert counted == counts, (path, body)
            assert close(choices, alone), (path, body)
            for choice in (*choices.values(), *alone.values()):
                choice.scores = []
            assert choices == alone, (path, body)
