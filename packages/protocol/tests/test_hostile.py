"""Attacks of strangers on a tcp:// inbox: a test for each advisory of other servers that concerns the wire."""

import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from tercet.protocol.config import Dial, NodeConfig
from tercet.protocol.membership.peers import UNSENT_TIME
from tercet.protocol.messages.messages import AbortReq, Heartbeat
from tercet.protocol.messages.values import Phase, Role
from tercet.protocol.node import PeerDown, PeerUp, ThreadNode
from tercet.protocol.testing import INBOXES, Listener
from tercet.protocol.transport.channel import Bounds, Inbox
from tercet.protocol.transport.keys import write_keys
from tercet.protocol.transport.security import Security

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16) + b"\x00" + bytes(31)
"""ZMTP 3.1 with the NULL mechanism, https://rfc.zeromq.org/spec/37."""
CURVE_GREETING = GREETING.replace(b"NULL\0", b"CURVE")
READY = b"\x04\x1a\x05READY\x0bSocket-Type\x00\x00\x00\x04PUSH"


@pytest.fixture(params=["plain", "keys"])
def link(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[ThreadNode, ThreadNode]]:
    """Return a scheduler on tcp:// and a frontend that it must continue to serve."""
    settings: dict[Role, dict[str, object]] = {role: {"insecure_loopback": True} for role in Role}
    if request.param == "keys":
        write_keys(tmp_path)
        settings = {role: {"security": Security.load(tmp_path / role.value, role)} for role in Role}
    nodes: list[ThreadNode] = []
    for role in (Role.SCHEDULER, Role.FRONTEND):
        dials = (Dial(Role.SCHEDULER, nodes[0].address),) if nodes else ()
        fields: dict[str, object] = {"connect": dials, "silence": 30.0} | settings[role]
        config = NodeConfig(role, f"{role.value}-0", "tcp://127.0.0.1:0", **fields)  # type: ignore[arg-type]
        nodes.append(ThreadNode(config, INBOXES[role], lambda _: Heartbeat(phase=Phase.IDLE)))
        nodes[-1].start()
    Listener(nodes[1]).wait_for(PeerUp)
    yield nodes[0], nodes[1]
    for node in nodes:
        node.close("the test is over")


def dial(node: ThreadNode) -> socket.socket:
    host, _, port = node.address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def throw(node: ThreadNode, *parts: bytes) -> None:
    """Send bytes and read until the other side closes or is silent."""
    with dial(node) as stranger:
        stranger.settimeout(0.2)
        try:
            for part in parts:
                stranger.sendall(part)
            while stranger.recv(65536):
                pass
        except OSError:
            return


def check_serves(link: tuple[ThreadNode, ThreadNode]) -> None:
    scheduler, frontend = link
    listener = Listener(scheduler)
    assert frontend.send("scheduler-0", AbortReq(rid="still here"))
    assert listener.wait_for(AbortReq).message == AbortReq(rid="still here")
    assert [peer.peer for peer in scheduler.peers()] == ["frontend-0"]
    assert not [each for each in frontend.drain(0) if isinstance(each.message, PeerDown)]


SCANS = {
    "nothing": [b""],
    "http": [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"],
    "tls": [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500)],
    "redis": [b"*1\r\n$4\r\nPING\r\n"],
    "zeros": [bytes(10_000)],
    "ones": [b"\xff" * 10_000],
    "half a greeting": [GREETING[:30]],
    "an old greeting": [b"\xff" + bytes(8) + b"\x7f\x00" + bytes(60)],
    "another mechanism": [GREETING.replace(b"NULL\0", b"PLAIN"), bytes(100)],
    "garbage after the greeting": [GREETING, os.urandom(2000)],
    "garbage after the other greeting": [CURVE_GREETING, os.urandom(2000)],
    "a giant command": [GREETING, b"\x06" + struct.pack(">Q", 2**62) + bytes(1000)],
    "a giant command under keys": [CURVE_GREETING, b"\x06" + struct.pack(">Q", 2**62) + bytes(1000)],
    "a giant frame": [GREETING, READY, b"\x02" + struct.pack(">Q", 2**62) + bytes(1000)],
    "a frame of more than the bound": [GREETING, READY, b"\x02" + struct.pack(">Q", 257 * 2**20) + bytes(1000)],
    "a negative length": [GREETING, READY, b"\x02" + b"\xff" * 8 + bytes(1000)],
    "a truncated frame": [GREETING, READY, b"\x02" + struct.pack(">Q", 1000) + bytes(10)],
    "empty frames": [GREETING, READY, b"\x00\x00" * 1000],
    "wrong flags": [GREETING, READY, b"\xf8\x05hello" * 10],
}


@pytest.mark.parametrize("scan", SCANS)
def test_port_scanner_bytes_harm_nobody(link: tuple[ThreadNode, ThreadNode], scan: str) -> None:
    """vLLM issue 44486: bytes of a port scanner killed its coordinator, and with it the server."""
    throw(link[0], *SCANS[scan])
    check_serves(link)


def test_a_crowd_of_silent_connections_keeps_nobody_out(link: tuple[ThreadNode, ThreadNode]) -> None:
    """CVE-2025-30202: connections that only read or stay silent must not block others."""
    crowd = [dial(link[0]) for _ in range(200)]
    try:
        check_serves(link)
    finally:
        for each in crowd:
            each.close()
    check_serves(link)


def test_thousands_of_garbage_frames_are_counted_while_others_are_served(
    link: tuple[ThreadNode, ThreadNode], tmp_path: Path
) -> None:
    scheduler, frontend = link
    security = scheduler._core.config.security
    frames = [[os.urandom(40)], [b"", b""], [os.urandom(30), os.urandom(300)], [b"x"] * 3, [b"\x83", bytes(2000)]]
    count = 3000
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.linger = 0
        if security:
            rogue = Security.load(tmp_path / "detokenizer", Role.DETOKENIZER)
            push.curve_secretkey, push.curve_publickey = rogue.secret, rogue.public
            push.curve_serverkey = security.public
        push.connect(scheduler.address)

        def flood() -> None:
            for number in range(count):
                push.send_multipart(frames[number % len(frames)])

        thread = threading.Thread(target=flood)
        thread.start()
        listener = Listener(scheduler)
        for number in range(200):
            assert frontend.send("scheduler-0", AbortReq(rid=str(number)))
            assert listener.wait_for(AbortReq).message == AbortReq(rid=str(number))
        thread.join(60)
        wait(lambda: scheduler.counters.get("dropped_undecodable", 0) == count)
    check_serves(link)


def wait(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


def test_no_sender_makes_us_hold_more_than_the_bounds(tmp_path: Path) -> None:
    """Frames of any length and unlimited queues are known ways to exhaust memory."""
    bounds = Bounds(queue=10, frame_bytes=100_000)
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        inbox = Inbox(context, f"ipc://{tmp_path}/run/x.{'a' * 16}.ipc", bounds)
        push.linger, push.sndhwm = 0, 10
        push.connect(inbox.address)
        taken, end = 0, time.monotonic() + 1
        while time.monotonic() < end:
            try:
                push.send(bytes(100_000), zmq.NOBLOCK)
                taken += 1
            except zmq.Again:
                time.sleep(0.01)
        assert taken < 60, "beyond the two queues nothing is taken"
        inbox.close()


STARVED = """
import resource, sys
from tercet.protocol.config import Dial, NodeConfig
from tercet.protocol.transport.keys import write_keys
from tercet.protocol.messages.messages import Heartbeat, SchedulerInbox
from tercet.protocol.node import PeerUp, ThreadNode
from tercet.protocol.transport.security import Security
from tercet.protocol.testing import Listener
from tercet.protocol.messages.values import Phase, Role

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
security = Security.load(sys.argv[1] + "/scheduler", Role.SCHEDULER)
dials = (Dial(Role.DETOKENIZER, "tcp://127.0.0.1:" + sys.argv[2]),)
config = NodeConfig(Role.SCHEDULER, "scheduler-0", "tcp://0.0.0.0:0", connect=dials, security=security)
node = ThreadNode(config, SchedulerInbox, lambda _: Heartbeat(phase=Phase.IDLE))
node.start()
print(node.address.rpartition(":")[2], flush=True)
Listener(node).wait_for(PeerUp, timeout=60)
print("met", flush=True)
node.close()
"""


def test_silent_connections_that_take_every_descriptor_kill_nobody(tmp_path: Path) -> None:
    """A stranger that takes all descriptors delays the next Hello, and nothing else."""
    write_keys(tmp_path)
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    command = [sys.executable, "-c", STARVED, str(tmp_path), str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as part:
        assert part.stdout
        assert part.stderr
        address = ("127.0.0.1", int(part.stdout.readline()))
        crowd = [socket.create_connection(address, timeout=10) for _ in range(60)]
        try:
            assert "Too many open files" in part.stderr.readline(), "it came to that"
            time.sleep(0.6)  # some more Hellos are due
            assert part.poll() is None
        finally:
            for each in crowd:
                each.close()
        security = Security.load(tmp_path / "detokenizer", Role.DETOKENIZER)
        config = NodeConfig(Role.DETOKENIZER, "detokenizer-0", f"tcp://127.0.0.1:{port}", security=security)
        node = ThreadNode(config, INBOXES[Role.DETOKENIZER], lambda _: Heartbeat(phase=Phase.IDLE))
        node.start()
        try:
            assert part.stdout.readline() == "met\n", "and it says Hello once it can"
        finally:
            node.close()
            part.kill()


def test_where_another_program_spoke_zeromq_a_part_is_found_later() -> None:
    skipped = 0.0
    fields: dict[str, object] = {"insecure_loopback": True, "silence": 60.0}
    with zmq.Context() as context, context.socket(zmq.SUB) as stranger:
        port = stranger.bind_to_random_port("tcp://127.0.0.1")
        address = f"tcp://127.0.0.1:{port}"
        with stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL) as monitor:
            config = NodeConfig(
                Role.FRONTEND,
                "frontend-0",
                "tcp://127.0.0.1:0",
                connect=(Dial(Role.SCHEDULER, address),),
                **fields,  # type: ignore[arg-type]
            )
            frontend = ThreadNode(
                config,
                INBOXES[Role.FRONTEND],
                lambda _: Heartbeat(phase=Phase.IDLE),
                clock=lambda: time.monotonic() + skipped,
            )
            frontend.start()
            assert monitor.poll(10_000), "they do not get on"
            stranger.disable_monitor()
    scheduler = ThreadNode(
        NodeConfig(Role.SCHEDULER, "scheduler-0", address, **fields),  # type: ignore[arg-type]
        INBOXES[Role.SCHEDULER],
        lambda _: Heartbeat(phase=Phase.IDLE),
    )
    scheduler.start()
    try:
        refused, deadline = frontend.counters["refused_full"], time.monotonic() + 10
        while frontend.counters["refused_full"] == refused:  # until one more Hello could not be sent
            assert time.monotonic() < deadline
            time.sleep(0.01)
        skipped = UNSENT_TIME
        Listener(frontend).wait_for(PeerUp)
    finally:
        scheduler.close("the test is over")
        frontend.close("the test is over")
