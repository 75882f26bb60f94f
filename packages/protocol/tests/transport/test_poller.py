"""Poller: one descriptor wakes the waiter for each kind of event."""

import os
import select
import threading
import time
from collections.abc import Iterator

import pytest

from tercet.protocol.transport.poller import Poller

LONG = 10.0


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    pipe = os.pipe()
    yield pipe
    for descriptor in pipe:
        os.close(descriptor)


@pytest.fixture
def poller() -> Iterator[Poller]:
    poller = Poller([])
    yield poller
    poller.close()


def seconds(poller: Poller, limit: float = LONG) -> float:
    start = time.monotonic()
    poller.wait(limit)
    return time.monotonic() - start


def test_it_waits_as_long_as_it_is_told_when_nothing_happens(poller: Poller) -> None:
    assert 0.05 <= seconds(poller, 0.05) < 1.0
    assert seconds(poller, -1.0) < 1.0


def test_a_bell_wakes_it_from_any_thread_and_is_heard_once(poller: Poller) -> None:
    threading.Timer(0.05, poller.wake).start()
    assert seconds(poller) < LONG / 2
    for _ in range(100_000):
        poller.wake()  # more than a pipe can hold
    assert seconds(poller, LONG) < LONG / 2
    while select.select([poller.fileno()], [], [], 0)[0]:
        poller.wait(0)
    assert seconds(poller, 0.05) >= 0.05


def test_news_of_a_connection_is_told_from_other_things(poller: Poller, pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    poller.watch(reader)
    assert poller.wait(LONG), "nobody has asked what happened before it was watched"
    poller.wake()
    assert not poller.wait(LONG)
    os.write(writer, b"x")
    assert poller.wait(LONG)
    poller.unwatch(reader)
    assert not poller.wait(0)


def test_an_inbox_wakes_it_and_is_no_news(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    poller = Poller([reader])
    os.write(writer, b"x")
    assert select.select([poller.fileno()], [], [], LONG)[0], "loops wait at its descriptor"
    start = time.monotonic()
    assert not poller.wait(LONG)
    assert time.monotonic() - start < LONG / 2
    poller.close()


def test_closing_twice_and_ringing_afterwards_are_harmless(poller: Poller) -> None:
    poller.close()
    poller.close()
    poller.wake()
