"""Numbered messages: published, missed, replayed, and never waited for."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from tercet.protocol.errors import ChannelError
from tercet.protocol.transport.replay_publisher import PublisherSettings, ReplayPublisher

END = (-1).to_bytes(8, "big", signed=True)
PATIENCE = 10_000


@contextmanager
def publisher(directory: Path, **settings: Any) -> Iterator[ReplayPublisher]:
    """A publisher of capitals."""
    common = {"bind": True, "topic": b"kv", "buffer_steps": 100, "hwm": 1000, "max_queue_size": 1000}
    addresses = {"endpoint": f"ipc://{directory}/pub", "replay_endpoint": f"ipc://{directory}/replay"}
    opened = ReplayPublisher(PublisherSettings(**{**common, **addresses, **settings}), bytes.upper)
    try:
        yield opened
    finally:
        opened.close()


@contextmanager
def client(kind: int, address: str, **options: int) -> Iterator[Any]:
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.linger, socket.rcvtimeo, socket.ipv6 = 0, PATIENCE, True
        for name, value in options.items():
            setattr(socket, name, value)
        if kind == zmq.SUB:
            socket.subscribe(b"")
        socket.connect(address)
        yield socket


def replayed(socket: Any, first: int, *path: bytes) -> list[tuple[int, bytes]]:
    socket.send_multipart([*path, first.to_bytes(8, "big")])
    found: list[tuple[int, bytes]] = []
    while True:
        *back, number, payload = socket.recv_multipart()
        assert tuple(back) == path
        if number == END:
            assert payload == b""
            return found
        found.append((int.from_bytes(number, "big"), payload))


def received_after_subscription(source: ReplayPublisher, socket: Any) -> tuple[int, bytes]:
    """The first message that a subscriber gets: those before its subscription are lost."""
    for _ in range(1000):
        assert source.submit(b"again")
        if socket.poll(10):
            topic, number, payload = socket.recv_multipart()
            assert topic == b"kv"
            return int.from_bytes(number, "big"), payload
    raise AssertionError("nothing arrives")


@pytest.mark.parametrize("path", [(), (b"",)])
def test_a_subscriber_asks_for_those_that_it_missed(tmp_path: Path, path: tuple[bytes, ...]) -> None:
    with publisher(tmp_path) as source, client(zmq.DEALER, source.replay_endpoint) as missing:
        assert source.submit(b"first")
        deadline = time.monotonic() + 10
        while replayed(missing, 0, *path) != [(0, b"FIRST")]:
            assert time.monotonic() < deadline
        with client(zmq.SUB, source.endpoint) as subscriber:
            number, payload = received_after_subscription(source, subscriber)
        assert payload == b"AGAIN"
        assert number > 0
        assert replayed(missing, 0, *path)[: number + 1] == [
            (0, b"FIRST"),
            *((later, b"AGAIN") for later in range(1, number + 1)),
        ]
        assert replayed(missing, 10**9, *path) == []


@pytest.mark.parametrize("bound", [{"buffer_steps": 3}, {"buffer_bytes": 3}], ids=["messages", "bytes"])
def test_only_the_latest_are_replayed(tmp_path: Path, bound: dict[str, int]) -> None:
    with publisher(tmp_path, **bound) as source, client(zmq.DEALER, source.replay_endpoint) as missing:
        for number in range(10):
            assert source.submit(b"%d" % number)
        deadline = time.monotonic() + 10
        while (found := replayed(missing, 0))[-1:] != [(9, b"9")]:
            assert time.monotonic() < deadline
        assert found == [(7, b"7"), (8, b"8"), (9, b"9")]


def test_a_request_of_another_form_is_ignored(tmp_path: Path) -> None:
    with publisher(tmp_path) as source, client(zmq.DEALER, source.replay_endpoint) as missing:
        assert source.submit(b"first")
        for garbage in ([b""], [b"x"], [b"", b"", b"", bytes(8)], [b"123456789"]):
            missing.send_multipart(garbage)
        with client(zmq.DEALER, source.replay_endpoint) as hostile:
            hostile.send(bytes(1_000_000))
        assert replayed(missing, 0) == [(0, b"FIRST")]


def test_a_slow_subscriber_delays_neither_the_publisher_nor_others(tmp_path: Path) -> None:
    with (
        publisher(tmp_path, hwm=100) as source,
        client(zmq.SUB, source.endpoint, rcvhwm=1) as slow,
        client(zmq.SUB, source.endpoint) as fast,
    ):
        received_after_subscription(source, fast)
        received_after_subscription(source, slow)
        began, payload = time.monotonic(), bytes(100_000)
        for _ in range(300):
            assert source.submit(payload)
            while fast.recv_multipart()[2] != payload:
                pass
        assert time.monotonic() - began < 5
        got = 0
        while slow.poll(100):
            got += slow.recv_multipart()[2] == payload
        assert got < 300, "it was not slow"


def test_an_address_in_use_is_an_error() -> None:
    settings = {"replay_endpoint": None, "endpoint": "tcp://127.0.0.1:0"}
    with publisher(Path(), **settings) as source:
        assert not source.endpoint.endswith(":0")
        with (
            pytest.raises(ChannelError, match=source.endpoint),
            publisher(Path(), **settings | {"endpoint": source.endpoint}),
        ):
            pass


def test_a_full_queue_refuses_a_message_and_loses_none(tmp_path: Path) -> None:
    with publisher(tmp_path, max_queue_size=2) as source, client(zmq.DEALER, source.replay_endpoint) as missing:
        sent = [number for number in range(20_000) if source.submit(b"%d" % number)]
        deadline = time.monotonic() + 10
        while (found := replayed(missing, max(0, len(sent) - 10)))[-1:] != [(len(sent) - 1, b"%d" % sent[-1])]:
            assert time.monotonic() < deadline
        assert [payload for _, payload in found] == [b"%d" % number for number in sent[-10:]]
