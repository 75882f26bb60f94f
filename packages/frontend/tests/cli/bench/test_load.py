"""Figures from timelines, and a load on a server that answers at known times."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from tercet.frontend.cli.bench.client import BenchError, Target, Timeline, complete
from tercet.frontend.cli.bench.load import Goal, figures, run_workload
from tercet.frontend.cli.bench.workload import WORKLOADS, Request, Workload, make_requests, single_token_words

TWO = Workload(concurrency=2, requests=5, input_tokens=3, output_tokens=4, shared_tokens=2)
Reply = Callable[[asyncio.StreamWriter, dict[str, object]], Awaitable[None]]


def event(text: str = "", **more: object) -> bytes:
    choices = [{"text": text, "finish_reason": None}] if text else []
    return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"


async def answer(writer: asyncio.StreamWriter, body: dict[str, object]) -> None:
    parts = [event("a"), event("b"), event("cd"), event(usage={"completion_tokens": 4, "prompt_tokens": 5})]
    for part in [*parts, b"data: [DONE]\n\n"]:
        writer.write(b"%x\r\n%s\r\n" % (len(part), part))
        await writer.drain()
    writer.write(b"0\r\n\r\n")


class Peer:
    """Server that answers each request with `reply`, and records requests and concurrency."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self.bodies: list[dict[str, object]] = []
        self.most = self._now = 0

    async def on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._now += 1
        self.most = max(self.most, self._now)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        self.bodies.append(body)
        if self._reply is answer:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await self._reply(writer, body)
        self._now -= 1
        writer.close()
        await writer.wait_closed()


@asynccontextmanager
async def peer(reply: Reply = answer) -> AsyncIterator[tuple[Peer, Target]]:
    served = Peer(reply)
    server = await asyncio.start_server(served.on_connection, "127.0.0.1", 0)
    async with server:
        yield served, Target(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", model="m")


async def test_every_prompt_is_asked_once_and_so_many_at_a_time() -> None:
    load = make_requests(TWO, single_token_words(None), 7)
    async with peer() as (served, target):
        result = await run_workload(target, TWO, load)
    assert sorted(str(body["prompt"]) for body in served.bodies) == sorted(request.prompt for request in load)
    assert served.most == 2
    assert {(body["max_tokens"], body["stream"], body["ignore_eos"]) for body in served.bodies} == {(4, True, True)}
    assert (result.requests, result.failed, result.short, result.output_tokens, result.input_tokens) == (
        5,
        0,
        0,
        20,
        25,
    )
    assert len(result.ttft_ms) == 4
    assert result.ttft_ms["p50"] > 0


async def test_at_a_rate_all_are_asked_however_many_are_under_way() -> None:
    async with peer() as (served, target):
        result = await run_workload(target, TWO, make_requests(TWO, single_token_words(None), 7), rate=1e4)
    assert len(served.bodies) == result.requests == 5


async def test_pieces_are_timed_and_usage_counts_the_tokens() -> None:
    async with peer() as (_, target):
        timeline = await complete(target, "x", 4)
    assert (timeline.output_tokens, timeline.input_tokens, len(timeline.pieces)) == (4, 5, 3)
    assert timeline.sent < timeline.pieces[0] <= timeline.pieces[-1] <= timeline.ended


async def test_what_goes_wrong_is_counted_and_told() -> None:
    async def refuse(writer: asyncio.StreamWriter, body: dict[str, object]) -> None:
        writer.write(b"HTTP/1.1 503 No\r\nContent-Length: 4\r\n\r\nbusy")

    async def hang_up(writer: asyncio.StreamWriter, body: dict[str, object]) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n" + event("a"))

    async def spoil(writer: asyncio.StreamWriter, body: dict[str, object]) -> None:
        part = event(error={"message": "no memory"})
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(part), part))

    for reply, why in ((refuse, "HTTP 503: busy"), (hang_up, "hung up"), (spoil, "no memory")):
        async with peer(reply) as (_, target):
            with pytest.raises(BenchError, match=why):
                await complete(target, "x", 4)
            result = await run_workload(target, TWO, [Request("x", 4)] * 5)
        assert (result.requests, result.failed, result.output_tokens) == (5, 5, 0)
        assert why in result.first_error
    with pytest.raises(BenchError, match="no server at"):
        await complete(target, "x", 4)


def timeline(first: float, per_token: float, tokens: int) -> Timeline:
    pieces = [10 + first + index * per_token for index in range(tokens)]
    return Timeline(sent=10.0, pieces=pieces, ended=pieces[-1], output_tokens=tokens, input_tokens=9)


def test_percentiles_are_nearest_rank_and_goodput_needs_both_goals() -> None:
    lines = [timeline(0.001 * index, 0.002 if index <= 60 else 0.004, 4) for index in range(1, 101)]
    result = figures(lines, [], 0, 2.0, Goal(first_token=0.0805, per_token=0.003))
    assert {name: round(value, 6) for name, value in result.ttft_ms.items()} == {
        "p50": 50.0,
        "p90": 90.0,
        "p99": 99.0,
        "mean": 50.5,
    }
    assert (round(result.tpot_ms["p50"], 6), round(result.itl_ms["p90"], 6)) == (2.0, 4.0)
    assert (result.good_requests_per_second, result.output_tokens_per_second) == (30.0, 200.0)
    assert json.loads(result.to_json("W1"))["requests"] == 100


def test_one_token_has_no_time_per_token() -> None:
    result = figures([timeline(0.5, 0.0, 1)], ["x"], 1, 1.0, Goal(per_token=0.001))
    assert (result.tpot_ms, result.itl_ms, result.short, result.failed) == ({}, {}, 1, 1)


def texts_of(workload: Workload, words: Sequence[str], seed: int) -> list[str]:
    return [request.prompt for request in make_requests(workload, words, seed)]


async def test_an_answer_of_another_length_than_asked_for_is_short() -> None:
    async with peer() as (_, target):
        result = await run_workload(target, TWO, [Request("x", 4), Request("x", 5)])
    assert (result.requests, result.short) == (2, 1)


def test_mixed_lengths_cover_their_range_and_no_more() -> None:
    load = make_requests(replace(WORKLOADS["W6"], requests=2000), single_token_words(None), 1)
    inputs, outputs = {len(one.prompt.split()) for one in load}, {one.output_tokens for one in load}
    assert (min(inputs), max(inputs), min(outputs), max(outputs)) == (16, 512, 8, 256)


def test_prompts_share_what_they_should_and_no_more() -> None:
    texts = texts_of(TWO, ["red", "green", "blue", "grey", "pink", "gold"], 1)
    assert {len(text.split()) for text in texts} == {5}
    assert len({tuple(text.split()[:2]) for text in texts}) == 1
    assert len(set(texts)) > 1
    assert texts_of(TWO, single_token_words(None), 1) != texts_of(TWO, single_token_words(None), 2)
    assert WORKLOADS["W4"].shared_tokens == 1024


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Workload(concurrency=0, requests=1, input_tokens=1, output_tokens=1)
    with pytest.raises(ValueError, match="between 1 and the most"):
        replace(TWO, least_input_tokens=4)
    with pytest.raises(ValueError, match="not an http"):
        Target(url="ftp://x", model="m")
