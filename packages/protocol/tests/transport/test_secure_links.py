"""Nodes over tcp:// with CURVE keys: holders of the right key connect, and other senders get no frame through."""

import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

from tercet.protocol.config import Dial, NodeConfig
from tercet.protocol.errors import AddressError
from tercet.protocol.messages.codec import Envelope, encode, encode_envelope
from tercet.protocol.messages.messages import AbortReq, BatchTokenIDOutput, Heartbeat, Hello, Ready, Rejected
from tercet.protocol.messages.values import Phase, Role, pack_ints, unpack_ints
from tercet.protocol.node import PeerDown, PeerReady, PeerUp, ThreadNode
from tercet.protocol.testing import INBOXES, Listener
from tercet.protocol.transport.endpoints import Tcp
from tercet.protocol.transport.keys import write_keys
from tercet.protocol.transport.security import Security

FRONTEND, SCHEDULER, DETOKENIZER, SUPERVISOR = Role.FRONTEND, Role.SCHEDULER, Role.DETOKENIZER, Role.SUPERVISOR
Keys = dict[Role, Security]
Start = Callable[..., ThreadNode]


@pytest.fixture
def start(keys: Keys) -> Iterator[Start]:
    nodes: list[ThreadNode] = []

    def make(role: Role, *dials: Dial, key: Security | None = None, peer: str = "", **settings: object) -> ThreadNode:
        fields: dict[str, object] = {
            "role": role,
            "peer": peer or f"{role.value}-0",
            "listen": "tcp://127.0.0.1:0",
            "connect": dials,
            "heartbeat_interval": 0.05,
            "security": key or keys[role],
        }
        node = ThreadNode(
            NodeConfig(**fields | settings),  # type: ignore[arg-type]
            INBOXES[role],
            lambda _: Heartbeat(phase=Phase.IDLE),
        )
        node.start()
        nodes.append(node)
        return node

    yield make
    for node in nodes:
        node.close("the test is over")


def at(node: ThreadNode, role: Role, host: str = "127.0.0.1") -> Dial:
    return Dial(role, f"tcp://{host}:{node.address.rpartition(':')[2]}")


def wait(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)


@pytest.mark.parametrize("listen", ["tcp://127.0.0.1:0", "tcp://0.0.0.0:0", "tcp://[::1]:0"])
def test_all_meet_and_a_whole_batch_flows(start: Start, listen: str) -> None:
    host = "[::1]" if ":1]" in listen else "127.0.0.1"
    if host == "[::1]" and not _has_ipv6():
        pytest.skip("no IPv6 on this machine")
    supervisor = start(SUPERVISOR, listen=listen)
    settings = {"listen": listen, "supervisor": at(supervisor, SUPERVISOR, host).spec}
    scheduler, detokenizer = start(SCHEDULER, **settings), start(DETOKENIZER, **settings)
    start(FRONTEND, at(scheduler, SCHEDULER, host), at(detokenizer, DETOKENIZER, host), **settings)
    at_scheduler, at_detokenizer = Listener(scheduler), Listener(detokenizer)
    at_scheduler.wait_for(PeerUp, "detokenizer-0")
    at_supervisor = Listener(supervisor)
    for peer in ("scheduler-0", "detokenizer-0", "frontend-0"):
        at_supervisor.wait_for(Heartbeat, peer)
    rows, tokens = 256, 4
    for step in range(20):
        batch = BatchTokenIDOutput(
            rids=[f"request-{row}" for row in range(rows)],
            indices=pack_ints([0] * rows),
            attempts=pack_ints([0] * rows),
            positions=pack_ints([step * tokens] * rows),
            offsets=pack_ints(range(0, rows * tokens + 1, tokens)),
            token_ids=pack_ints(range(step, step + rows * tokens)),
        )
        assert scheduler.send("detokenizer-0", batch, bytes(500_000)), "a queue this short is never full"
    for step in range(20):
        delivery = at_detokenizer.wait_for(BatchTokenIDOutput)
        assert isinstance(delivery.message, BatchTokenIDOutput)
        assert list(unpack_ints(delivery.message.token_ids)) == list(range(step, step + rows * tokens))
        assert len(delivery.message.rids) == rows
        assert [frame.nbytes for frame in delivery.frames] == [500_000]


def _has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            return False
        return True


def test_a_wildcard_is_announced_as_the_address_of_the_route(start: Start) -> None:
    scheduler = start(SCHEDULER, listen="tcp://0.0.0.0:0")
    frontend = start(FRONTEND, at(scheduler, SCHEDULER, "127.0.0.5"), listen="tcp://0.0.0.0:0")
    Listener(frontend).wait_for(PeerUp, "scheduler-0")
    Listener(scheduler).wait_for(PeerUp, "frontend-0")
    addresses = [peer.hello.address for node in (frontend, scheduler) for peer in node._core.table.peers.values()]
    assert [address.rpartition(":")[0] for address in addresses] == ["tcp://127.0.0.1"] * 2
    wait(lambda: not [link for link in frontend._core.table.links.values() if link.state.name == "DIALLING"])


def test_an_advertised_address_is_used_instead(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    scheduler = start(SCHEDULER, listen=f"tcp://0.0.0.0:{port}", advertise=f"tcp://127.0.0.9:{port}")
    frontend = start(FRONTEND, at(scheduler, SCHEDULER))
    Listener(frontend).wait_for(PeerUp, "scheduler-0")
    assert frontend._core.table.peers["scheduler-0"].hello.address == f"tcp://127.0.0.9:{port}"


def _stranger(tmp_path: Path, role: Role) -> Security:
    write_keys(tmp_path / "others")
    return Security.load(tmp_path / "others" / role.value, role)


def test_a_wrong_key_never_connects(start: Start, keys: Keys, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The caller knows the right key of the scheduler; only its own key is wrong."""
    strange = _stranger(tmp_path, FRONTEND)
    mixed = Security(FRONTEND, strange.secret, {**keys[FRONTEND].publics, FRONTEND: strange.public})
    scheduler = start(SCHEDULER)
    frontend = start(FRONTEND, at(scheduler, SCHEDULER), key=mixed)
    wait(lambda: scheduler.counters.get("turned_away", 0) >= 2)
    assert (scheduler.peers(), frontend.peers()) == ([], [])
    assert scheduler.counters.get("received", 0) == 0
    assert any("does not accept our key" in record.message for record in caplog.records), "the caller is told"
    assert any("refused a connection" in record.message for record in caplog.records), "and so is the other"


def test_a_part_of_another_server_never_connects(start: Start, tmp_path: Path) -> None:
    scheduler = start(SCHEDULER)
    frontend = start(FRONTEND, at(scheduler, SCHEDULER), key=_stranger(tmp_path, FRONTEND))
    friend = start(FRONTEND, at(scheduler, SCHEDULER), peer="frontend-1")
    Listener(friend).wait_for(PeerUp, "scheduler-0")
    Listener(scheduler).wait_for(PeerUp, "frontend-1")
    wait(lambda: frontend.counters.get("refused_full", 0) >= 3)
    assert [peer.peer for peer in scheduler.peers()] == ["frontend-1"]


def test_keys_that_fit_after_a_restart_are_taken(start: Start, keys: Keys, tmp_path: Path) -> None:
    """The scheduler first runs with other keys; once it has the right ones, the frontend needs no word of it."""
    strange = _stranger(tmp_path, FRONTEND)
    known = Security(SCHEDULER, keys[SCHEDULER].secret, {**keys[SCHEDULER].publics, FRONTEND: strange.public})
    scheduler = start(SCHEDULER, key=known)
    listen = scheduler.address
    frontend = start(FRONTEND, at(scheduler, SCHEDULER))
    wait(lambda: scheduler.counters.get("turned_away", 0) >= 1)
    scheduler.close("with other keys")
    start(SCHEDULER, listen=listen)
    Listener(frontend).wait_for(PeerUp, "scheduler-0", timeout=20)


def test_a_plain_client_gets_no_frame_through(start: Start) -> None:
    scheduler = start(SCHEDULER)
    hello = Hello(
        peer="frontend-9",
        incarnation="1" * 16,
        role=FRONTEND,
        address="tcp://127.0.0.1:1",
        version=(1, 0),
        features=["Hello"],
    )
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.linger = 0
        monitor = push.get_monitor_socket()
        push.connect(scheduler.address)
        frames = [encode_envelope(Envelope(source="frontend-9", incarnation="1" * 16)), encode(hello)]
        with suppress(zmq.Again):  # after a refusal there is no connection to queue for
            for _ in range(100):
                push.send_multipart(frames, zmq.NOBLOCK)
        events = set()
        end = time.monotonic() + 10
        while zmq.EVENT_DISCONNECTED not in events:
            assert time.monotonic() < end
            if monitor.poll(100):
                events.add(int.from_bytes(monitor.recv_multipart()[0][:2], "little"))
        push.disable_monitor()
        monitor.close(0)
    friend = start(FRONTEND, at(scheduler, SCHEDULER))
    Listener(friend).wait_for(PeerUp, "scheduler-0")
    Listener(scheduler).wait_for(PeerUp)
    assert [peer.peer for peer in scheduler.peers()] == ["frontend-0"]
    assert not {"dropped_undecodable", "dropped_unknown", "dropped_stale"} & scheduler.counters.keys()


def test_nobody_claims_another_role_than_its_keys(start: Start, keys: Keys) -> None:
    """The holder of a detokenizer's key says it is a frontend: its Hello is counted, and nothing comes of it."""
    scheduler = start(SCHEDULER)
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        _under(push, keys[DETOKENIZER], keys[SCHEDULER].public)
        push.connect(scheduler.address)
        hello = Hello(
            peer="frontend-9",
            incarnation="1" * 16,
            role=FRONTEND,
            address="tcp://127.0.0.1:1",
            version=(1, 0),
            features=["Hello"],
        )
        push.send_multipart([encode_envelope(Envelope(source="frontend-9", incarnation="1" * 16)), encode(hello)])
        wait(lambda: scheduler.counters.get("dropped_forbidden") == 1)
    assert scheduler.peers() == []


def test_nobody_speaks_in_another_roles_name(start: Start, keys: Keys) -> None:
    """A detokenizer knows a frontend's incarnation and the scheduler's; with its own key it still cannot abort."""
    scheduler = start(SCHEDULER)
    frontend = start(FRONTEND, at(scheduler, SCHEDULER))
    Listener(scheduler).wait_for(PeerUp, "frontend-0")
    envelope = Envelope(source="frontend-0", incarnation=frontend.incarnation, target=scheduler.incarnation)
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        _under(push, keys[DETOKENIZER], keys[SCHEDULER].public)
        push.connect(scheduler.address)
        push.send_multipart([encode_envelope(envelope), encode(AbortReq(rid="forged"))])
        wait(lambda: scheduler.counters.get("dropped_forbidden") == 1)
    assert frontend.send("scheduler-0", AbortReq(rid="mine"))
    assert Listener(scheduler).wait_for(AbortReq).message == AbortReq(rid="mine")


def test_nobody_takes_the_address_of_another_role(start: Start, keys: Keys) -> None:
    """The holder of a detokenizer's key can claim anything about detokenizers; other roles' links are unaffected."""
    elsewhere = "tcp://127.0.0.1:1"
    scheduler = start(SCHEDULER, Dial(FRONTEND, elsewhere))
    frontend = start(FRONTEND, at(scheduler, SCHEDULER))
    at_scheduler, at_frontend = Listener(scheduler), Listener(frontend)
    at_scheduler.wait_for(PeerUp, "frontend-0")
    at_frontend.wait_for(PeerUp, "scheduler-0")
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        _under(push, keys[DETOKENIZER], keys[SCHEDULER].public)
        push.connect(scheduler.address)
        for address in (frontend.address, elsewhere):
            claim = Hello(
                peer="detokenizer-9",
                incarnation="1" * 16,
                role=DETOKENIZER,
                address=address,
                version=(1, 0),
                features=["Hello"],
            )
            push.send_multipart([encode_envelope(Envelope(source=claim.peer, incarnation="1" * 16)), encode(claim)])
        wait(lambda: scheduler.counters.get("dropped_forbidden") == 1)
    assert scheduler.counters["refused_hello"] == 1
    assert scheduler.send("frontend-0", Rejected(rid="r", attempt=0, code="queue_full", message=""))
    assert at_frontend.wait_for(Rejected)
    assert not [each for each in at_scheduler.heard + scheduler.drain(0) if isinstance(each.message, PeerDown)]


def _under(push: "zmq.Socket[bytes]", keys: Security, server: bytes) -> None:
    push.linger = 0
    push.curve_secretkey, push.curve_publickey, push.curve_serverkey = keys.secret, keys.public, server


def test_a_busy_main_thread_keeps_nobody_outside(start: Start) -> None:
    """While too much waits for the main thread the inbox is left alone, but not the door."""
    scheduler = start(SCHEDULER, max_pending=10)
    first = start(FRONTEND, at(scheduler, SCHEDULER))
    Listener(first).wait_for(PeerUp, "scheduler-0")
    for number in range(50):
        first.send("scheduler-0", AbortReq(rid=str(number)))
    wait(lambda: scheduler._delivered > 10)
    second = start(FRONTEND, at(scheduler, SCHEDULER), peer="frontend-1")
    wait(lambda: second.counters.get("sent", 0) > 0, 10)
    Listener(scheduler).wait_for(PeerUp, "frontend-1")


REFUSED = [
    ({"listen": "tcp://0.0.0.0:1"}, "tcp://0.0.0.0:1"),
    ({"listen": "tcp://127.0.0.1:1"}, "--insecure-loopback"),
    ({"connect": ("tcp://10.0.0.1:1",)}, "tcp://10.0.0.1:1"),
    ({"connect": (Dial(SCHEDULER, "tcp://scheduler:1"),)}, "tcp://scheduler:1"),
    ({"supervisor": "tcp://localhost:1"}, "--keys"),
    ({"advertise": "tcp://10.0.0.1:1"}, "tercet keys"),
    ({"listen": "tcp://192.168.0.1:1", "insecure_loopback": True}, "for loopback only"),
]


@pytest.mark.parametrize(("settings", "named"), REFUSED)
def test_tcp_without_keys_is_refused_at_the_start_in_one_line(settings: dict[str, object], named: str) -> None:
    with pytest.raises(AddressError) as caught:
        NodeConfig(**{"role": FRONTEND, "peer": "f", "listen": "ipc:///run/x"} | settings)  # type: ignore[arg-type]
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_loopback_without_keys_is_for_those_who_ask_for_it() -> None:
    config = NodeConfig(SCHEDULER, "s", "tcp://127.0.0.1:0", insecure_loopback=True)
    node = ThreadNode(config, INBOXES[SCHEDULER], lambda _: Heartbeat(phase=Phase.IDLE))
    node.start()
    node.close()


def test_a_node_uses_its_own_roles_keys_and_says_whom_it_calls(keys: Keys) -> None:
    with pytest.raises(ValueError, match="a frontend cannot use the keys of a scheduler"):
        NodeConfig(FRONTEND, "f", "tcp://127.0.0.1:0", security=keys[SCHEDULER])
    with pytest.raises(AddressError, match="whose key"):
        NodeConfig(FRONTEND, "f", "tcp://127.0.0.1:0", connect=("tcp://127.0.0.1:1",), security=keys[FRONTEND])


def test_ipc_needs_no_keys_and_is_plain_also_where_there_are_some(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    listen = f"ipc://{tmp_path}/run"
    scheduler = start(SCHEDULER, listen=listen)
    frontend = start(FRONTEND, Dial(SCHEDULER, f"{listen}/scheduler-*"), listen=listen)
    scheduler.set_ready(Ready())
    Listener(frontend).wait_for(PeerReady, "scheduler-0")
    Listener(scheduler).wait_for(Heartbeat, "frontend-0")
    assert not caplog.records


def test_a_closed_node_frees_its_port_at_once(start: Start) -> None:
    scheduler = start(SCHEDULER)
    frontend = start(FRONTEND, at(scheduler, SCHEDULER))
    Listener(frontend).wait_for(PeerUp)
    began = time.monotonic()
    scheduler.close("done")
    assert time.monotonic() - began < 2
    target = scheduler.address.removeprefix("tcp://").rpartition(":")
    with socket.create_server((target[0], int(target[2]))):
        assert Tcp(target[0], int(target[2])).is_loopback
