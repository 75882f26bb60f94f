"""One descriptor for everything: whoever waits there is woken by each of them, and by a bell."""

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
def waiter() -> Iterator[Poller]:
    waiter = Poller([])
    yield waiter
    waiter.close()


def seconds(waiter: Poller, limit: float = LONG) -> float:
    start = time.monotonic()
    waiter.wait(limit)
    return time.monotonic() - start


def test_it_waits_as_long_as_it_is_told_when_nothing_happens(waiter: Poller) -> None:
    assert 0.05 <= seconds(waiter, 0.05) < 1.0
    assert seconds(waiter, -1.0) < 1.0


def test_a_bell_wakes_it_from_any_thread_and_is_heard_once(waiter: Poller) -> None:
    threading.Timer(0.05, waiter.ring).start()
    assert seconds(waiter) < LONG / 2
    for _ in range(100_000):
        waiter.ring()  # more than a pipe holds
    assert seconds(waiter, LONG) < LONG / 2
    while select.select([waiter.fileno()], [], [], 0)[0]:
        waiter.wait(0)
    assert seconds(waiter, 0.05) >= 0.05


def test_news_of_a_connection_is_told_from_other_things(waiter: Poller, pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    waiter.watch(reader)
    assert waiter.wait(LONG), "nobody has asked what happened before it was watched"
    waiter.ring()
    assert not waiter.wait(LONG)
    os.write(writer, b"x")
    assert waiter.wait(LONG)
    waiter.unwatch(reader)
    assert not waiter.wait(0)


def test_an_inbox_wakes_it_and_is_no_news(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    waiter = Poller([reader])
    os.write(writer, b"x")
    assert select.select([waiter.fileno()], [], [], LONG)[0], "loops wait at its descriptor"
    start = time.monotonic()
    assert not waiter.wait(LONG)
    assert time.monotonic() - start < LONG / 2
    waiter.close()


def test_closing_twice_and_ringing_afterwards_are_harmless(waiter: Poller) -> None:
    waiter.close()
    waiter.close()
    waiter.ring()
