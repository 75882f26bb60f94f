"""Real nodes over real sockets: they meet, notice each other's deaths, and shrug off garbage."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from tercet.protocol.config import NodeConfig
from tercet.protocol.errors import AddressError, ChannelError, NodeFailed
from tercet.protocol.messages.codec import Envelope, encode, encode_envelope
from tercet.protocol.messages.messages import (
    AbortReq,
    BatchTokenIDOutput,
    ControlReply,
    Goodbye,
    Heartbeat,
    Hello,
    Ready,
    Rejected,
    SchedulerInbox,
    TokenizerFiles,
    TokenizerFilesReq,
)
from tercet.protocol.messages.values import Phase, Role
from tercet.protocol.node import PeerDown, PeerReady, PeerUp, ThreadNode
from tercet.protocol.testing import Listener, Network
from tercet.protocol.transport.peer_auth import MAX_PER_PEER

FRONTEND, SCHEDULER, DETOKENIZER, SUPERVISOR = Role.FRONTEND, Role.SCHEDULER, Role.DETOKENIZER, Role.SUPERVISOR


class Gate:
    """Heartbeat that a test can block, and with it the node's thread, which then neither reads nor sends."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._stuck = threading.Event()

    def __call__(self, _: str) -> Heartbeat:
        if not self._open.is_set():
            self._stuck.set()
            self._open.wait(30)
        return Heartbeat(phase=Phase.STEP)

    def shut(self) -> None:
        """Block the node, and return once it hangs."""
        self._open.clear()
        assert self._stuck.wait(10)

    def open(self) -> None:
        self._stuck.clear()
        self._open.set()


@pytest.fixture
def gate(network: Network) -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


def eventually(holds: bool, deadline: float) -> bool:
    """Return False once the condition holds, for loops that wait; raise TimeoutError after the deadline."""
    if not holds and time.monotonic() > deadline:
        raise TimeoutError
    time.sleep(0.002)
    return not holds


def test_two_nodes_meet_and_hear_when_one_is_ready(network: Network) -> None:
    scheduler = network.node(SCHEDULER)
    frontend = network.node(FRONTEND)
    at_frontend, at_scheduler = Listener(frontend), Listener(scheduler)
    up = at_frontend.wait_for(PeerUp).message
    assert isinstance(up, PeerUp)
    assert (up.peer, up.role, up.incarnation) == ("scheduler-0", SCHEDULER, scheduler.incarnation)
    assert "TokenizedGenerateReqInput" in up.features
    at_scheduler.wait_for(PeerUp, "frontend-0")
    sent = time.monotonic()
    assert frontend.send("scheduler-0", AbortReq(rid="r1"), b"frame 0", b"frame 1"), "up means it can be sent to"
    delivery = at_scheduler.wait_for(AbortReq)
    assert delivery.at == pytest.approx(sent, abs=10)
    assert delivery.source == "frontend-0"
    assert delivery.message == AbortReq(rid="r1")
    assert [bytes(frame) for frame in delivery.frames] == [b"frame 0", b"frame 1"]
    scheduler.set_ready(Ready(url="here"))
    assert at_frontend.wait_for(PeerReady).message == PeerReady("scheduler-0", SCHEDULER, Ready(url="here"))
    assert [(info.peer, info.ready) for info in frontend.peers()] == [("scheduler-0", Ready(url="here"))]
    at_scheduler.wait_for(Heartbeat, "frontend-0")
    at_frontend.wait_for(Heartbeat, "scheduler-0")


def test_a_frontend_brings_schedulers_and_detokenizers_together(network: Network) -> None:
    supervisor = network.node(SUPERVISOR)
    scheduler, detokenizer = network.node(SCHEDULER), network.node(DETOKENIZER)
    network.node(FRONTEND)
    Listener(scheduler).wait_for(PeerUp, "detokenizer-0")
    Listener(detokenizer).wait_for(PeerUp, "scheduler-0")
    at_supervisor = Listener(supervisor)
    for peer in ("scheduler-0", "detokenizer-0", "frontend-0"):
        at_supervisor.wait_for(Heartbeat, peer)


def test_what_was_queued_for_a_dead_incarnation_never_reaches_the_next(network: Network, gate: Gate) -> None:
    frontend = network.node(FRONTEND, queue=100)
    at_frontend = Listener(frontend)
    old = network.node(SCHEDULER, status=gate)
    at_frontend.wait_for(Heartbeat, "scheduler-0")
    gate.shut()
    sent = sum(frontend.send("scheduler-0", AbortReq(rid="old", reason="x" * 50_000)) for _ in range(150))
    assert sent > 10, "the old one reads nothing, so they wait for it"
    new = network.node(SCHEDULER)
    at_frontend.wait_for(PeerDown, "scheduler-0")
    assert at_frontend.wait_for(PeerUp, "scheduler-0").message == PeerUp(
        "scheduler-0", SCHEDULER, new.incarnation, next(iter(_features(at_frontend)))
    )
    assert frontend.send("scheduler-0", AbortReq(rid="new"))
    at_new = Listener(new)
    at_new.wait_for(AbortReq)
    at_new.wait_for(Heartbeat)
    rids = [delivery.message.rid for delivery in at_new.heard if isinstance(delivery.message, AbortReq)]
    assert rids == ["new"]
    gate.open()
    old.close()


def _features(listener: Listener) -> Iterator[list[str]]:
    return (delivery.message.features for delivery in listener.heard if isinstance(delivery.message, PeerUp))


def test_messages_for_an_earlier_start_are_dropped_and_counted(network: Network) -> None:
    scheduler = network.node(SCHEDULER)
    frontend = network.node(FRONTEND)
    Listener(scheduler).wait_for(PeerUp, "frontend-0")
    deadline = time.monotonic() + 10
    with raw_push(scheduler) as push:
        stale = Envelope(source="frontend-0", incarnation=frontend.incarnation, target="0" * 16)
        unknown = Envelope(source="frontend-0", incarnation="0" * 16, target=scheduler.incarnation)
        for envelope in (stale, unknown):
            push.send_multipart([encode_envelope(envelope), encode(AbortReq(rid="r"))])
        while eventually(scheduler.counters.get("dropped_unknown") == 1, deadline):
            pass
    assert scheduler.counters["dropped_stale"] == 1
    assert not [delivery for delivery in scheduler.drain(0) if isinstance(delivery.message, AbortReq)]


def test_a_silent_peer_goes_down_and_comes_back(network: Network, gate: Gate) -> None:
    network.node(SCHEDULER, status=gate)
    frontend = Listener(network.node(FRONTEND))
    frontend.wait_for(Heartbeat, "scheduler-0")
    gate.shut()
    start = time.monotonic()
    down = frontend.wait_for(PeerDown).message
    assert isinstance(down, PeerDown)
    assert "silent" in down.reason
    assert 0.5 < time.monotonic() - start < 5.0
    assert not frontend.node.send("scheduler-0", AbortReq(rid="r"))
    assert frontend.node.counters["refused_unknown"] >= 1
    gate.open()
    frontend.wait_for(PeerUp, "scheduler-0")
    frontend.wait_for(Heartbeat, "scheduler-0")


def test_a_full_queue_says_so_and_recovers(network: Network, gate: Gate) -> None:
    scheduler = network.node(SCHEDULER, status=gate, queue=10, silence=60.0)
    frontend = network.node(FRONTEND, queue=10, silence=60.0)
    Listener(frontend).wait_for(Heartbeat, "scheduler-0")
    gate.shut()
    message = AbortReq(rid="r", reason="x" * 100_000)
    deadline = time.monotonic() + 10
    sent, refusals = 0, 0
    while refusals < 50:
        assert time.monotonic() < deadline
        if frontend.send("scheduler-0", message):
            sent, refusals = sent + 1, 0
        else:
            refusals += 1
            time.sleep(0.002)
    assert sent < 60
    assert frontend.counters["refused_full"] >= 50
    gate.open()
    listener = Listener(scheduler)
    for _ in range(sent):
        listener.wait_for(AbortReq)
    while not frontend.send("scheduler-0", AbortReq(rid="last")):
        assert time.monotonic() < deadline
    assert listener.wait_for(AbortReq).message == AbortReq(rid="last"), "what was refused was not sent"


def raw_push(node: ThreadNode) -> "zmq.Socket[bytes]":
    push: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
    push.linger = 0
    push.connect(node.address)
    return push


def test_garbage_is_counted_and_harms_nobody(network: Network, caplog: pytest.LogCaptureFixture) -> None:
    scheduler = network.node(SCHEDULER, silence=30.0)
    frontend = network.node(FRONTEND, silence=30.0)
    listener = Listener(scheduler)
    listener.wait_for(PeerUp, "frontend-0")
    mine = Envelope(source="frontend-0", incarnation=frontend.incarnation, target=scheduler.incarnation)
    forged = Hello(
        peer="frontend-9", incarnation="1" * 16, role=FRONTEND, address="tcp://127.0.0.1:1", version=(1, 0), features=[]
    )
    with raw_push(scheduler) as push:
        garbage = [
            [b""],
            [b"GET / HTTP/1.1"],
            [b"", b""],
            [os.urandom(100), os.urandom(1000)],
            [encode_envelope(mine)],
            [encode_envelope(mine), b"garbage"],
            [encode_envelope(mine), encode(Rejected(rid="r", attempt=0, code="c", message="not for a scheduler"))],
            [encode_envelope(mine), encode(forged)],
            [encode_envelope(Envelope(source="frontend-8", incarnation="1" * 16)), encode(forged)],
            [b"x"] * 5000,
        ]
        for frames in garbage * 20:
            push.send_multipart(frames)
        deadline = time.monotonic() + 10
        while eventually(scheduler.counters.get("dropped_undecodable", 0) == 20 * len(garbage), deadline):
            pass
    assert frontend.send("scheduler-0", AbortReq(rid="r"))
    listener.wait_for(AbortReq)
    assert {info.peer for info in scheduler.peers()} == {"frontend-0"}
    assert 1 <= len([record for record in caplog.records if "dropped" in record.message]) <= 10, "told, not shouted"


def test_varied_envelope_encodings_are_accepted_in_bounded_memory(network: Network) -> None:
    scheduler, frontend = network.node(SCHEDULER), network.node(FRONTEND)
    listener = Listener(scheduler)
    listener.wait_for(PeerUp, "frontend-0")
    envelope = {"source": "frontend-0", "incarnation": frontend.incarnation, "target": scheduler.incarnation}
    with raw_push(scheduler) as push:
        for number in range(100):
            way = msgspec.msgpack.encode({**envelope, "later": number})
            push.send_multipart([way, encode(AbortReq(rid=str(number)))])
        for number in range(100):
            assert listener.wait_for(AbortReq).message == AbortReq(rid=str(number))
    assert len(scheduler._core._envelopes) <= MAX_PER_PEER


def test_a_peer_is_never_sent_what_it_did_not_announce(network: Network) -> None:
    network.node(SCHEDULER)
    frontend = network.node(FRONTEND)
    Listener(frontend).wait_for(PeerUp, "scheduler-0")
    assert not frontend.send("scheduler-0", ControlReply(id="c", ok=True))
    assert not frontend.send("nobody", AbortReq(rid="r"))
    assert frontend.counters["refused_unannounced"] == 1
    assert frontend.counters["refused_unknown"] == 1


def test_answers_are_given_while_the_main_thread_is_busy(network: Network) -> None:
    def files(source: str, message: object) -> tuple[TokenizerFiles, bytes]:
        assert isinstance(message, TokenizerFilesReq)
        return TokenizerFiles(id=message.id, model="demo", names=["tokenizer.json"], sha256=[source]), bytes(5_000_000)

    scheduler = network.node(SCHEDULER, answers={TokenizerFilesReq: files})
    frontend = Listener(network.node(FRONTEND))
    frontend.wait_for(PeerUp, "scheduler-0")
    assert frontend.node.send("scheduler-0", TokenizerFilesReq(id="q"))
    reply = frontend.wait_for(TokenizerFiles)
    assert reply.message == TokenizerFiles(id="q", model="demo", names=["tokenizer.json"], sha256=["frontend-0"])
    assert [frame.nbytes for frame in reply.frames] == [5_000_000]
    assert not [delivery for delivery in scheduler.drain(0) if isinstance(delivery.message, TokenizerFilesReq)]


def test_drain_waits_no_longer_than_asked_and_can_be_woken(network: Network) -> None:
    node = network.node(SCHEDULER)
    start = time.monotonic()
    assert node.drain(0) == []
    assert node.drain(0.05) == []
    assert 0.04 < time.monotonic() - start < 2.0
    threading.Timer(0.05, node.wake).start()
    assert node.drain(None) == []


def test_goodbye_is_heard_at_once(network: Network) -> None:
    scheduler = network.node(SCHEDULER)
    frontend = Listener(network.node(FRONTEND, silence=60.0))
    frontend.wait_for(PeerUp)
    scheduler.close("maintenance")
    assert frontend.wait_for(PeerDown, timeout=5.0).message == PeerDown(
        "scheduler-0", SCHEDULER, "goodbye: maintenance"
    )
    assert [path.name.split(".")[0] for path in network.directory.iterdir()] == ["frontend-0"]
    assert scheduler.drain(None) == [] or scheduler.drain(0) == []


def test_a_broken_status_fails_the_part(network: Network) -> None:
    def status(_: str) -> Heartbeat:
        raise ZeroDivisionError("a broken invariant")

    scheduler = network.node(SCHEDULER, status=status)
    frontend = Listener(network.node(FRONTEND))
    frontend.wait_for(PeerUp)
    with pytest.raises(NodeFailed, match="broken invariant"):  # noqa: PT012 - what was delivered before comes first
        for _ in range(10):
            scheduler.drain(10)
    frontend.wait_for(PeerDown)


def test_another_major_version_is_told_why(network: Network) -> None:
    scheduler = network.node(SCHEDULER)
    path = network.directory / "frontend-2.aaaa.ipc"
    hello = Hello(
        peer="frontend-2", incarnation="a" * 16, role=FRONTEND, address=f"ipc://{path}", version=(2, 0), features=[]
    )
    pull: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
    with raw_push(scheduler) as push, pull:
        pull.bind(hello.address)
        push.send_multipart([encode_envelope(Envelope(source="frontend-2", incarnation="a" * 16)), encode(hello)])
        frames = []
        for _ in range(2):
            assert pull.poll(10_000)
            frames.append(pull.recv_multipart())
        for _ in range(3):
            push.send_multipart([encode_envelope(Envelope(source="frontend-2", incarnation="a" * 16)), encode(hello)])
        deadline = time.monotonic() + 10
        while eventually(scheduler.counters["refused_hello"] == 4, deadline):
            pass
    assert b"\xa7version\x92\x01\x01" in frames[0][1]
    assert frames[1][1] == encode(Goodbye(reason="frontend-2 speaks wire version 2.0, this part speaks 1.1"))
    assert scheduler.peers() == []


def test_a_flood_beyond_what_may_wait_is_held_back_without_losing_peers(network: Network) -> None:
    scheduler = network.node(SCHEDULER, max_pending=200)
    frontend = network.node(FRONTEND)
    at_frontend = Listener(frontend)
    at_frontend.wait_for(PeerUp, "scheduler-0")
    sent, refused, deadline = 0, 0, time.monotonic() + 30
    while refused < 100:
        assert time.monotonic() < deadline, "the flood never meets a bound"
        if frontend.send("scheduler-0", AbortReq(rid=str(sent))):
            sent, refused = sent + 1, 0
        else:
            refused += 1
            time.sleep(0.02 * network.silence)
    assert [info.peer for info in frontend.peers()] == ["scheduler-0"], "it still sends heartbeats"
    assert scheduler.counters["received"] < 1000 < sent, "the rest waits in the sockets"
    listener = Listener(scheduler)
    assert [listener.wait_for(AbortReq).message for _ in range(sent)] == [AbortReq(rid=str(i)) for i in range(sent)]
    assert not [delivery for delivery in listener.heard if isinstance(delivery.message, PeerDown)]


def test_addresses_that_could_never_work_are_refused_at_once(tmp_path: Path) -> None:
    listen = f"ipc://{tmp_path}/run"
    for settings in (
        {"listen": "tcp://0.0.0.0:0"},
        {"listen": "ipc://relative"},
        {"connect": ("tcp://10.0.0.1:1",)},
        {"supervisor": "nonsense"},
        {"peer": "a/b"},
        {"advertise": "tcp://127.0.0.1:0"},
        {"silence": 0.1},
    ):
        with pytest.raises((AddressError, ValueError)):
            NodeConfig(**{"role": SCHEDULER, "peer": "scheduler-0", "listen": listen} | settings)
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o777)
    node = ThreadNode(
        NodeConfig(SCHEDULER, "scheduler-0", listen), SchedulerInbox, lambda _: Heartbeat(phase=Phase.IDLE)
    )
    with pytest.raises(ChannelError, match="writable by others"):
        node.start()
    node.close()


def test_batches_flow_both_ways_in_order(network: Network) -> None:
    detokenizer, scheduler = network.node(DETOKENIZER), network.node(SCHEDULER)
    network.node(FRONTEND)
    Listener(scheduler).wait_for(PeerUp, "detokenizer-0")
    listener = Listener(detokenizer)
    deadline = time.monotonic() + 20
    for number in range(2000):
        batch = BatchTokenIDOutput(
            rids=[str(number)], indices=b"", attempts=b"", positions=b"", offsets=b"", token_ids=b""
        )
        while not scheduler.send("detokenizer-0", batch):
            assert time.monotonic() < deadline
            time.sleep(0.001)
    rids = [listener.wait_for(BatchTokenIDOutput).message for _ in range(2000)]
    assert [batch.rids[0] for batch in rids if isinstance(batch, BatchTokenIDOutput)] == list(map(str, range(2000)))
