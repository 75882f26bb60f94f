"""Sockets that never wait, never queue for the absent, and survive what is thrown at them."""

import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tercet.protocol.errors import AddressError, ChannelError
from tercet.protocol.messages.codec import Frame
from tercet.protocol.transport.channel import Bounds, Connection, Context, Inbox, Outbox, make_private
from tercet.protocol.transport.poller import Poller


@pytest.fixture
def context() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/run/scheduler-0.{'a' * 16}.ipc"


def receive(inbox: Inbox, timeout: float = 10.0) -> list[Frame]:
    poller = Poller(inbox.filenos())
    end = time.monotonic() + timeout
    while (received := inbox.receive()) is None:
        assert time.monotonic() < end, "nothing came"
        poller.wait(end - time.monotonic())
    poller.close()
    return received.frames


def send(outbox: Outbox, *frames: Frame, timeout: float = 10.0) -> None:
    end = time.monotonic() + timeout
    while not outbox.send(frames):
        assert time.monotonic() < end, "nobody takes it"
        time.sleep(0.001)


def test_frames_arrive_whole_and_in_order(context: Context, address: str) -> None:
    inbox, outbox = Inbox(context, address), Outbox(context, address)
    large = os.urandom(3_000_000)
    send(outbox, b"envelope", b"message", large, memoryview(large)[:1_000_000].cast("i"), b"")
    first = receive(inbox)
    assert first[:2] == [b"envelope", b"message"]
    assert first[2:] == [large, large[:1_000_000], b""]
    assert all(isinstance(frame, memoryview) for frame in first[2:]), "payloads are not copied"
    for number in range(500):
        send(outbox, b"e", str(number).encode())
    assert [receive(inbox)[1] for _ in range(500)] == [str(number).encode() for number in range(500)]
    assert inbox.receive() is None
    assert outbox.counters["sent"] == 501
    outbox.close()
    inbox.close()


def test_nothing_queues_for_an_absent_peer(context: Context, address: str) -> None:
    outbox = Outbox(context, address)
    assert not outbox.send([b"e", b"too early"])
    assert outbox.counters == {"sent": 0, "refused_full": 1, "refused_oversized": 0}
    inbox = Inbox(context, address)
    send(outbox, b"e", b"in time")
    assert receive(inbox)[1] == b"in time"
    assert outbox.connection_change() is Connection.UP
    assert outbox.connection_change() is None
    inbox.close()
    end = time.monotonic() + 10
    while outbox.connection_change() is not Connection.LOST:
        assert time.monotonic() < end
        time.sleep(0.005)
    while outbox.send([b"e", b"too late"]):
        assert time.monotonic() < end
        time.sleep(0.005)
    outbox.close()
    assert not outbox.send([b"e", b"closed"])


def test_a_full_queue_refuses_at_once_and_recovers(context: Context, address: str) -> None:
    bounds = Bounds(queue=10)
    inbox, outbox = Inbox(context, address, bounds), Outbox(context, address, bounds)
    send(outbox, b"e", bytes(100_000))
    taken, refused_at, longest = 1, 0.0, 0.0
    end = time.monotonic() + 10
    while not refused_at or time.monotonic() - refused_at < 0.2:
        assert time.monotonic() < end, "the queue never fills"
        start = time.monotonic()
        if outbox.send([b"e", bytes(100_000)]):
            taken, refused_at = taken + 1, 0.0
        else:
            refused_at = refused_at or start
            time.sleep(0.001)
        longest = max(longest, time.monotonic() - start)
    assert taken < 60, "the queue is bounded"
    assert longest < 0.5, "a full queue holds nobody up"
    assert [len(receive(inbox)[1]) for _ in range(taken)] == [100_000] * taken
    send(outbox, b"e", b"again")
    assert receive(inbox)[1] == b"again", "what was refused was not sent"
    outbox.close()
    inbox.close()


def test_a_giant_frame_is_not_sent(context: Context, address: str) -> None:
    bounds = Bounds(frame_bytes=1000)
    inbox, outbox = Inbox(context, address, bounds), Outbox(context, address, bounds)
    send(outbox, b"e", bytes(1000))
    assert not outbox.send([b"e", b"m", bytes(1001)])
    assert not outbox.send([b"e", b"m", memoryview(bytes(1004)).cast("i")])
    assert outbox.counters["refused_oversized"] == 2
    assert len(receive(inbox)[1]) == 1000
    outbox.close()
    inbox.close()


def test_whoever_sends_a_giant_frame_is_cut_off_and_nobody_else(context: Context, address: str) -> None:
    bounds = Bounds(frame_bytes=1000)
    inbox, outbox, rogue = Inbox(context, address, bounds), Outbox(context, address, bounds), context.socket(zmq.PUSH)
    rogue.connect(address)
    rogue.send_multipart([b"rogue", b"small"])
    assert receive(inbox)[0] == b"rogue"
    rogue.send_multipart([b"rogue", bytes(5_000_000)])
    send(outbox, b"e", b"still here")
    assert receive(inbox)[1] == b"still here"
    outbox.close()
    rogue.close(linger=0)
    inbox.close()


def test_a_message_of_too_many_frames_counts_as_empty(context: Context, address: str) -> None:
    inbox, outbox = Inbox(context, address, Bounds(frames=8)), Outbox(context, address)
    send(outbox, *[b"x"] * 5000)
    send(outbox, *[b"y"] * 8)
    assert receive(inbox) == []
    assert receive(inbox) == [b"y"] * 8
    outbox.close()
    inbox.close()


def test_the_directory_is_made_private(context: Context, address: str, tmp_path: Path) -> None:
    inbox = Inbox(context, address)
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    assert [path.name for path in (tmp_path / "run").iterdir()] == [f"scheduler-0.{'a' * 16}.ipc"]
    inbox.close()
    assert not list((tmp_path / "run").iterdir()), "its path goes with the inbox"


def test_directories_above_that_are_missing_are_made_private_too(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_private(tmp_path / "a" / "b" / "run")
        make_private(tmp_path / "a" / "b" / "run")
    finally:
        os.umask(before)
    for path in (tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "run"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_nobody_else_may_connect_whatever_the_umask(context: Context, tmp_path: Path) -> None:
    """Others may enter a directory of mode 0755, and a writable socket would accept them as peers."""
    before = os.umask(0)
    try:
        (tmp_path / "run").mkdir(mode=0o755)
        inbox = Inbox(context, f"ipc://{tmp_path}/run/a.0123456789abcdef.ipc")
    finally:
        os.umask(before)
    try:
        [path] = (tmp_path / "run").iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        inbox.close()


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_directory_others_can_write_to_is_refused(context: Context, address: str, tmp_path: Path, mode: int) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(mode)
    with pytest.raises(ChannelError, match="writable by others"):
        Inbox(context, address)


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(ChannelError, match="cannot hold sockets"):
        make_private(tmp_path / "run")


def test_what_killed_incarnations_left_is_removed_and_the_living_kept(
    context: Context, address: str, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    dead, living, other = (directory / f"{name}.ipc" for name in (f"scheduler-0.{'b' * 16}", f"scheduler-0.{'c' * 16}",
                                                                  f"scheduler-1.{'d' * 16}"))  # fmt: skip
    listeners = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    for listener, path in zip(listeners, (dead, living, other), strict=True):
        listener.bind(str(path))
    listeners[1].listen()
    listeners[0].close()
    file, link = directory / f"scheduler-0.{'e' * 16}.ipc", directory / f"scheduler-0.{'f' * 16}.ipc"
    file.write_text("of the user's own")
    link.symlink_to(dead)
    inbox = Inbox(context, address)
    assert not dead.exists()
    assert file.exists(), "what is no socket is not ours to remove"
    assert link.is_symlink()
    assert living.exists()
    assert other.exists(), "another peer's socket is not ours to remove"
    inbox.close()
    for listener in listeners:
        listener.close()


def test_tcp_is_for_loopback_and_tells_its_port(context: Context) -> None:
    inbox = Inbox(context, "tcp://127.0.0.1:0")
    assert not inbox.address.endswith(":0")
    outbox = Outbox(context, inbox.address)
    send(outbox, b"e", b"over tcp")
    assert receive(inbox)[1] == b"over tcp"
    with pytest.raises(ChannelError, match="cannot listen"):
        Inbox(context, inbox.address)
    outbox.close()
    inbox.close()
    for address in ("tcp://0.0.0.0:0", "tcp://10.1.2.3:4000"):
        with pytest.raises(AddressError, match="loopback"):
            Inbox(context, address)
        with pytest.raises(AddressError):
            Outbox(context, address)
