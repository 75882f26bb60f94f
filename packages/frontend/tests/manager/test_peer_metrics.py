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


def saying(number: str, value: float) -> Series:
    return Series(id=number, samples={"requests_open": [Sample(value=value)]})


class Asking:
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
    asking = Asking()
    number = await asking.sent()
    asking.peer_metrics.on_series("b", saying(number, 2))
    await asyncio.sleep(0.01)
    assert not asking.answer.done()
    asking.peer_metrics.on_series("a", saying(number, 1))
    assert await asking.done() == {"a": 1, "b": 2}


async def test_two_scrapes_at_a_time_do_not_mix_up_their_answers() -> None:
    asking = Asking()
    first = await asking.sent()
    other = asyncio.create_task(asking.peer_metrics.series())
    second = await asking.sent()
    assert first != second
    for peer in ("a", "b"):
        asking.peer_metrics.on_series(peer, saying(second, 20))
    assert not asking.answer.done()
    assert [each.id for each in (await other).values()] == [second, second]
    for peer in ("a", "b"):
        asking.peer_metrics.on_series(peer, saying(first, 10))
    assert await asking.done() == {"a": 10, "b": 10}


async def test_one_that_says_nothing_is_left_out_in_time_and_its_late_answer_means_nothing() -> None:
    asking = Asking(patience=0.05)
    number = await asking.sent()
    asking.peer_metrics.on_series("a", saying(number, 1))
    began = time.monotonic()
    assert await asking.done() == {"a": 1}
    assert time.monotonic() - began < 1
    asking.peer_metrics.on_series("b", saying(number, 2))
    again = asyncio.create_task(asking.peer_metrics.series())
    later = await asking.sent()
    asking.peer_metrics.on_series("a", saying(later, 3))
    asking.peer_metrics.on_series("b", saying(number, 2))
    assert set(await again) == {"a"}


async def test_one_that_is_not_up_is_not_waited_for() -> None:
    asking = Asking(full="b")
    asking.peer_metrics.on_series("a", saying(await asking.sent(), 1))
    assert await asking.done() == {"a": 1}


async def test_one_that_dies_meanwhile_is_not_waited_for() -> None:
    asking = Asking()
    number = await asking.sent()
    asking.peer_metrics.on_series("a", saying(number, 1))
    asking.peer_metrics.on_peer_down("a")
    asking.peer_metrics.on_peer_down("b")
    assert await asking.done() == {"a": 1}


async def test_one_that_talks_nonsense_is_left_out_and_told_of(caplog: pytest.LogCaptureFixture) -> None:
    asking = Asking()
    number = await asking.sent()
    asking.peer_metrics.on_series("b", saying(number, float("nan")))
    asking.peer_metrics.on_series("b", saying(number, 2))
    asking.peer_metrics.on_series("a", saying(number, 1))
    assert await asking.done() == {"a": 1}
    assert "b: invalid metrics, leaving them out: requests_open is no number of things" in caplog.text


async def test_nobody_but_siblings_is_heard_or_answered_and_each_once() -> None:
    asking = Asking()
    number = await asking.sent()
    asking.peer_metrics.on_series("stranger", saying(number, 100))
    asking.peer_metrics.on_series("a", saying(number, 1))
    asking.peer_metrics.on_series("a", saying(number, 100))
    asking.peer_metrics.on_series("b", saying("series-9", 100))
    asking.peer_metrics.on_series("b", saying(number, 2))
    assert await asking.done() == {"a": 1, "b": 2}
    asking.peer_metrics.on_request("stranger", MetricsReq(id="x"))
    asking.peer_metrics.on_request("b", MetricsReq(id="y"))
    assert asking.wire.take() == [("b", own("y"), ())]
