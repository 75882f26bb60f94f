"""Frontends that share one port: each answers a scrape for all of them, even if another one dies or hangs."""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from tests.server_process import Server

FRONTENDS = {"frontend-0", "frontend-1", "frontend-2"}
REQUESTS = 30
SCRAPES = 12
OPENMETRICS = {"accept": "application/openmetrics-text;version=1.0.0"}
BOUND = 3.0
"""Seconds for a scrape: one for a silent sibling, the rest for a busy machine."""


@pytest.fixture(scope="module")
def server(start: Callable[..., Server]) -> Iterator[Server]:
    """Yield three frontends at one port."""
    running = start("embedded", "--kv-cache-bytes", "64MiB", "--frontend-workers", str(len(FRONTENDS))).wait()
    yield running
    assert running.stop() == 0, "\n".join(running.lines)


def scrape(server: Server, headers: dict[str, str] | None = None) -> list[Metric]:
    """Scrape over a new connection. Each family comes once and complete, and each series once."""
    text = httpx2.get(f"{server.url}/metrics", headers=headers, timeout=BOUND).text
    heads = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")]
    assert len(heads) == len(set(heads)) > 25
    if headers is None:
        families = list(text_string_to_metric_families(text))
    else:
        families = list(openmetrics.text_string_to_metric_families(text))  # type: ignore[no-untyped-call]
    assert len(families) == len(heads), "what stands apart from its head is a family of its own"
    series = [(each.name, *sorted(each.labels.items())) for family in families for each in family.samples]
    assert len(series) == len(set(series))
    return families


def told(families: list[Metric], name: str, **labels: str) -> dict[str, float]:
    """Return the values of a series, by frontend or scheduler."""
    return {
        each.labels.get("frontend") or each.labels["scheduler"]: each.value
        for family in families
        for each in family.samples
        if each.name == f"tercet_{name}" and labels.items() <= each.labels.items()
    }


def finished(server: Server) -> dict[str, float]:
    """Return the requests that each frontend has answered."""
    return told(scrape(server), "requests_total", outcome="finished")


def ask(server: Server, model: str) -> None:
    """Send a request over a new connection, which any of the frontends may accept."""
    body = {"model": model, "prompt": "A tercet is", "max_tokens": 2, "ignore_eos": True}
    answer = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] == 2


def until(server: Server, condition: Callable[[dict[str, float]], bool], limit: float = 30.0) -> dict[str, float]:
    """Return the finished requests once they satisfy a condition in each of several scrapes."""
    end = time.monotonic() + limit
    while True:
        seen = [finished(server) for _ in range(4 * len(FRONTENDS))]
        if all(map(condition, seen)):
            return seen[-1]
        assert time.monotonic() < end, f"still {seen}"


def test_every_scrape_has_the_counts_of_all_and_each_scheduler_once(server: Server) -> None:
    before = until(server, lambda each: set(each) == FRONTENDS)
    model = server.model()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: ask(server, model), range(REQUESTS)))
    after = until(server, lambda each: sum(each.values()) == sum(before.values()) + REQUESTS)
    assert set(after) == FRONTENDS
    assert len(Counter(after) - Counter(before)) > 1, "one alone took all connections, which shows nothing"
    for number in range(SCRAPES):
        families = scrape(server, OPENMETRICS if number % 2 else None)
        assert told(families, "requests_total", outcome="finished") == after
        ours = {"method": "POST", "route": "/v1/completions", "status": "200"}
        assert sum(told(families, "http_responses_total", **ours).values()) == sum(after.values())
        assert sum(told(families, "request_output_tokens_sum", model=model).values()) == 2 * sum(after.values())
        assert sum(told(families, "request_seconds_bucket", model=model, le="+Inf").values()) == sum(after.values())
        assert set(told(families, "queued")) == {"scheduler-0"}
        assert told(families, "parts_ready", role="scheduler") == dict.fromkeys(FRONTENDS, 1)


def test_counters_of_a_killed_frontend_vanish_and_restart_from_zero(server: Server) -> None:
    model = server.model()
    while not all(until(server, lambda each: set(each) == FRONTENDS).values()):
        ask(server, model)
    before = until(server, lambda each: set(each) == FRONTENDS)
    server.part("frontend-1").kill()
    began, seen = time.monotonic(), [finished(server)]
    assert time.monotonic() - began < BOUND
    while "frontend-1" not in seen[-1] or seen[-1]["frontend-1"]:
        assert time.monotonic() < began + 30, seen[-1]
        seen.append(finished(server))
    others = {peer: before[peer] for peer in FRONTENDS - {"frontend-1"}}
    assert all(others.items() <= each.items() for each in seen), "the others are all there, all the time"
    assert until(server, lambda each: set(each) == FRONTENDS) == {**others, "frontend-1": 0}


def test_one_that_hangs_is_left_out_and_holds_nobody_up(server: Server) -> None:
    before = until(server, lambda each: set(each) == FRONTENDS)
    hung = server.part("frontend-2")
    os.kill(hung.pid, signal.SIGSTOP)
    try:
        times = []
        for _ in range(8):
            began = time.monotonic()
            assert finished(server) == {peer: before[peer] for peer in FRONTENDS - {"frontend-2"}}
            times.append(time.monotonic() - began)
        assert max(times) < BOUND
    finally:
        os.kill(hung.pid, signal.SIGCONT)
    assert until(server, lambda each: set(each) == FRONTENDS) == before
