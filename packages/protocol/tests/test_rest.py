"""Idle nodes: few heartbeats, but deaths are noticed as fast as always."""

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from tercet.protocol.aio import AsyncNode
from tercet.protocol.membership import heartbeat_timer as pulse
from tercet.protocol.messages.messages import AbortReq, FrontendInbox, GetInternalStateReq, Heartbeat, Ready
from tercet.protocol.messages.values import Load, Phase, Role
from tercet.protocol.node import Delivery, PeerDown, PeerReady, PeerUp, ThreadNode
from tercet.protocol.testing import Listener, Network

FRONTEND, SCHEDULER = Role.FRONTEND, Role.SCHEDULER
INTERVAL, REST = 0.1, 0.3
SLOW: dict[str, Any] = {"heartbeat_interval": 8.0, "silence": 60.0}
"""Settings with which a node does nothing during a test unless it is woken."""
SOON = 4.0


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    monkeypatch.setattr(pulse, "IDLE_AFTER", 0.7)
    with Network(heartbeat_interval=INTERVAL, silence=2.0) as network:
        yield network


def gap(listener: Listener, source: str, beats: int = 5) -> float:
    """Return the median time between heartbeats of a peer."""
    times = []
    for _ in range(beats + 1):
        listener.wait_for(Heartbeat, source)
        times.append(time.monotonic())
    return sorted(after - before for before, after in pairwise(times))[beats // 2]


def until_it_rests(listener: Listener, source: str) -> None:
    end = time.monotonic() + 20
    while gap(listener, source, 3) < 0.8 * REST:
        assert time.monotonic() < end, "it never rests"


def test_an_idle_part_slows_its_heartbeat_until_its_first_work(network: Network) -> None:
    scheduler, frontend = network.node(SCHEDULER), network.node(FRONTEND)
    listener = Listener(frontend)
    until_it_rests(listener, "scheduler-0")
    listener.wait_for(Heartbeat, "scheduler-0")
    assert frontend.send("scheduler-0", AbortReq(rid="r"))
    start = time.monotonic()
    for _ in range(6):
        listener.wait_for(Heartbeat, "scheduler-0")
    assert time.monotonic() - start < 4 * REST, "six quick beats take as long as two at rest"
    assert scheduler.counters["received"]


def test_a_query_of_its_state_leaves_an_idle_part_idle(network: Network) -> None:
    network.node(SCHEDULER)
    frontend = network.node(FRONTEND)
    listener = Listener(frontend)
    until_it_rests(listener, "scheduler-0")
    times = []
    for _ in range(6):
        assert frontend.send("scheduler-0", GetInternalStateReq(id="q"))
        listener.wait_for(Heartbeat, "scheduler-0")
        times.append(time.monotonic())
    assert sorted(after - before for before, after in pairwise(times))[2] > 0.8 * REST


def test_requests_of_a_frontend_quicken_heartbeats_of_other_parts(network: Network) -> None:
    """Otherwise a request lost on its way to an idle process would be missed late."""
    load = Load()
    network.node(SCHEDULER)
    frontend = network.node(FRONTEND, status=lambda _: Heartbeat(phase=Phase.IDLE, load=load))
    listener = Listener(frontend)
    until_it_rests(listener, "scheduler-0")
    load = Load(running=1)
    listener.wait_for(Heartbeat, "scheduler-0")
    assert gap(listener, "scheduler-0") < 0.8 * REST


def test_an_idle_part_that_hangs_is_found_within_the_silence_that_is_borne(network: Network) -> None:
    hangs, stuck = threading.Event(), threading.Event()

    def status(_: str) -> Heartbeat:
        if stuck.is_set():
            hangs.wait(30)
        return Heartbeat(phase=Phase.IDLE)

    network.node(SCHEDULER, status=status)
    listener = Listener(network.node(FRONTEND))
    until_it_rests(listener, "scheduler-0")
    stuck.set()
    start = time.monotonic()
    down = listener.wait_for(PeerDown).message
    assert isinstance(down, PeerDown)
    assert down.reason.startswith("silent for 2.")
    assert time.monotonic() - start < 2.0 + 0.5
    hangs.set()


CHILD = """
import sys, time
from tercet.protocol.messages.messages import Heartbeat, SchedulerInbox
from tercet.protocol.node import NodeConfig, ThreadNode
from tercet.protocol.messages.values import Phase, Role
config = NodeConfig(Role.SCHEDULER, "scheduler-0", "ipc://" + sys.argv[1])
ThreadNode(config, SchedulerInbox, lambda peer: Heartbeat(phase=Phase.IDLE)).start()
print("up", flush=True)
time.sleep(60)
"""


@pytest.fixture
def idle_child(network: Network) -> Iterator["subprocess.Popen[str]"]:
    """A scheduler process that does nothing."""
    arguments = [sys.executable, "-c", CHILD, str(network.directory)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        assert child.stdout.readline() == "up\n"
        yield child
        child.kill()


def test_a_dead_peer_wakes_whoever_rests(network: Network, idle_child: "subprocess.Popen[str]") -> None:
    listener = Listener(network.node(FRONTEND, **SLOW))
    listener.wait_for(PeerUp, "scheduler-0")
    listener.wait_for(Heartbeat, "scheduler-0")
    idle_child.send_signal(signal.SIGKILL)
    assert listener.wait_for(PeerDown, timeout=SOON).message == PeerDown(
        "scheduler-0", SCHEDULER, "its connection broke"
    )


async def test_a_dead_peer_wakes_a_loop_that_rests(network: Network, idle_child: "subprocess.Popen[str]") -> None:
    heard: asyncio.Queue[Delivery] = asyncio.Queue()

    def take(deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            heard.put_nowait(delivery)

    node = AsyncNode(network.config(FRONTEND, **SLOW), FrontendInbox, lambda _: Heartbeat(phase=Phase.IDLE), take)
    await node.start()
    async with asyncio.timeout(20):
        while not isinstance((await heard.get()).message, Heartbeat):
            pass
    idle_child.send_signal(signal.SIGKILL)
    async with asyncio.timeout(SOON):
        while not isinstance((await heard.get()).message, PeerDown):
            pass
    await node.close()


def test_what_a_node_that_rests_is_told_to_say_goes_out_now(network: Network) -> None:
    frontend, scheduler = Listener(network.node(FRONTEND)), network.node(SCHEDULER, **SLOW)
    frontend.wait_for(PeerUp)
    scheduler.set_ready(Ready(url="here"))
    assert frontend.wait_for(PeerReady, timeout=SOON).message == PeerReady("scheduler-0", SCHEDULER, Ready(url="here"))
    start = time.monotonic()
    scheduler.close("enough")
    assert time.monotonic() - start < SOON
    assert frontend.wait_for(PeerDown, timeout=SOON).message == PeerDown("scheduler-0", SCHEDULER, "goodbye: enough")


def test_a_node_that_rests_seldom_wakes(network: Network) -> None:
    """For its own beats and its peer's, of which there are ten in this time, with some that come with introductions."""
    wakes = dict.fromkeys((SCHEDULER, FRONTEND), 0)

    def counting(node: ThreadNode, role: Role) -> ThreadNode:
        receive = node._core.receive

        def count(limit: int) -> tuple[list[Delivery], bool]:
            wakes[role] += 1
            return receive(limit)

        node._core.receive = count  # type: ignore[method-assign]
        return node

    nodes = [counting(network.node(role), role) for role in wakes]
    until_it_rests(Listener(nodes[1]), "scheduler-0")
    before = dict(wakes)
    time.sleep(1.5)
    for role, count in wakes.items():
        assert count - before[role] < 40, role
