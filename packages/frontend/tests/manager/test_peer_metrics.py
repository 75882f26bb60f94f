"""Collection of metrics from peers: concurrent, with a timeout, and only from known peers."""

import asyncio
import time

import pytest

from tercet.frontend.manager.peer_metrics import PeerMetrics
from tercet.protocol.messages.messages import Message, MetricsReq, Series
from tercet.protocol.messages.values import Sample
from tercet.protocol.testing import FakeAsyncNode


def own(number: str) -> Series:
    return Series(id=number, samples={"requests_open": [Sample(value=7)]})


def series_of(number: str, value: float) -> Series:
    return Series(id=number, samples={"requests_open": [Sample(value=value)]})


class Collecting:
    """Frontend with the peers a and b that has just requested their series."""

    def __init__(self, patience: float = 10.0, full: str = "") -> None:
        self.wire = FakeAsyncNode(lambda _: None)
        self.wire.full.update(full)
        self.peer_metrics = PeerMetrics(self.wire, ["a", "b"], own, patience)
        self.answer = asyncio.create_task(self.peer_metrics.series())

    async def sent(self) -> str:
        """Return the request id, once the reachable peers were asked."""
        await asyncio.sleep(0)
        asked = {peer: message for peer, message, _ in self.wire.take()}
        assert set(asked) == {"a", "b"} - self.wire.full
        [message] = set(map(_asked, asked.values()))
        return message

    async def done(self) -> dict[str, float]:
        """Return each peer's counter."""
        async with asyncio.timeout(5):
            found = await self.answer
        return {peer: series.samples["requests_open"][0].value for peer, series in found.items()}


def _asked(message: Message) -> str:
    assert isinstance(message, MetricsReq)
    return message.id


async def test_who_has_no_siblings_asks_nobody_and_waits_for_nothing() -> None:
    wire = FakeAsyncNode(lambda _: None)
    assert await PeerMetrics(wire, [], own).series() == {}
    assert wire.sent == []


async def test_all_are_asked_at_once_and_their_answers_come_in_any_order() -> None:
    collecting = Collecting()
    number = await collecting.sent()
    collecting.peer_metrics.on_series("b", series_of(number, 2))
    await asyncio.sleep(0.01)
    assert not collecting.answer.done()
    collecting.peer_metrics.on_series("a", series_of(number, 1))
    assert await collecting.done() == {"a": 1, "b": 2}


async def test_two_scrapes_at_a_time_do_not_mix_up_their_answers() -> None:
    collecting = Collecting()
    first = await collecting.sent()
    other = asyncio.create_task(collecting.peer_metrics.series())
    second = await collecting.sent()
    assert first != second
    for peer in ("a", "b"):
        collecting.peer_metrics.on_series(peer, series_of(second, 20))
    assert not collecting.answer.done()
    assert [each.id for each in (await other).values()] == [second, second]
    for peer in ("a", "b"):
        collecting.peer_metrics.on_series(peer, series_of(first, 10))
    assert await collecting.done() == {"a": 10, "b": 10}


async def test_a_silent_frontend_is_left_out_and_its_late_metrics_are_ignored() -> None:
    collecting = Collecting(patience=0.05)
    number = await collecting.sent()
    collecting.peer_metrics.on_series("a", series_of(number, 1))
    began = time.monotonic()
    assert await collecting.done() == {"a": 1}
    assert time.monotonic() - began < 1
    collecting.peer_metrics.on_series("b", series_of(number, 2))
    again = asyncio.create_task(collecting.peer_metrics.series())
    later = await collecting.sent()
    collecting.peer_metrics.on_series("a", series_of(later, 3))
    collecting.peer_metrics.on_series("b", series_of(number, 2))
    assert set(await again) == {"a"}


async def test_one_that_is_not_up_is_not_waited_for() -> None:
    collecting = Collecting(full="b")
    collecting.peer_metrics.on_series("a", series_of(await collecting.sent(), 1))
    assert await collecting.done() == {"a": 1}


async def test_one_that_dies_meanwhile_is_not_waited_for() -> None:
    collecting = Collecting()
    number = await collecting.sent()
    collecting.peer_metrics.on_series("a", series_of(number, 1))
    collecting.peer_metrics.on_peer_down("a")
    collecting.peer_metrics.on_peer_down("b")
    assert await collecting.done() == {"a": 1}


async def test_one_that_talks_nonsense_is_left_out_and_told_of(caplog: pytest.LogCaptureFixture) -> None:
    collecting = Collecting()
    number = await collecting.sent()
    collecting.peer_metrics.on_series("b", series_of(number, float("nan")))
    collecting.peer_metrics.on_series("b", series_of(number, 2))
    collecting.peer_metrics.on_series("a", series_of(number, 1))
    assert await collecting.done() == {"a": 1}
    assert "b: invalid metrics, leaving them out: requests_open is no number of things" in caplog.text


async def test_nobody_but_siblings_is_heard_or_answered_and_each_once() -> None:
    collecting = Collecting()
    number = await collecting.sent()
    collecting.peer_metrics.on_series("stranger", series_of(number, 100))
    collecting.peer_metrics.on_series("a", series_of(number, 1))
    collecting.peer_metrics.on_series("a", series_of(number, 100))
    collecting.peer_metrics.on_series("b", series_of("series-9", 100))
    collecting.peer_metrics.on_series("b", series_of(number, 2))
    assert await collecting.done() == {"a": 1, "b": 2}
    collecting.peer_metrics.on_request("stranger", MetricsReq(id="x"))
    collecting.peer_metrics.on_request("b", MetricsReq(id="y"))
    assert collecting.wire.take() == [("b", own("y"), ())]
