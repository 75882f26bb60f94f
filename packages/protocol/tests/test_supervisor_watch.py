import asyncio
import tempfile
import time
from collections.abc import Iterator

import pytest

from packages.protocol.tests.world import START, World
from tercet.protocol.aio import AsyncNode
from tercet.protocol.messages.messages import FrontendInbox, Heartbeat, SchedulerInbox
from tercet.protocol.messages.values import Phase, Role
from tercet.protocol.node import SUPERVISOR_WARNING_INTERVAL, NodeConfig, SupervisorWatch, ThreadNode
from tercet.protocol.testing import ScriptedClock

SPEC = "ipc:///run/supervisor.*"


@pytest.fixture
def directory() -> Iterator[str]:
    """Return a short path."""
    with tempfile.TemporaryDirectory() as path:
        yield path


def idle(_: str) -> Heartbeat:
    return Heartbeat(phase=Phase.IDLE)


def alone(role: Role, directory: str) -> NodeConfig:
    return NodeConfig(role, f"{role}-0", f"ipc://{directory}", supervisor=f"ipc://{directory}/supervisor.*")


def test_a_supervisor_that_is_not_found_is_missed_aloud_again_and_again() -> None:
    world = World()
    scheduler = world.start(Role.SCHEDULER)
    watch = SupervisorWatch(SPEC, START)
    assert watch.warning(scheduler, START + SUPERVISOR_WARNING_INTERVAL - 0.1) == ""
    said = [
        watch.warning(scheduler, START + SUPERVISOR_WARNING_INTERVAL + seconds)
        for seconds in (0.0, 0.1, SUPERVISOR_WARNING_INTERVAL)
    ]
    there = f"no connection to the supervisor address={SPEC}"
    assert said == [f"{there} seconds=30 links: none", "", f"{there} seconds=60 links: none"]


def test_it_tells_how_far_each_link_came() -> None:
    world = World()
    scheduler = world.start(Role.SCHEDULER, dial=("ipc:///run/supervisor.1.ipc", "ipc:///run/supervisor.2.ipc"))
    world.mute.add("ipc:///run/supervisor.2.ipc")
    world.run(1.0)
    warning = SupervisorWatch(SPEC, world.now - SUPERVISOR_WARNING_INTERVAL).warning(scheduler, world.now)
    assert warning.split("links: ", 1)[1].split("; ") == [
        "ipc:///run/supervisor.1.ipc state=dialling hello_sent=no",
        "ipc:///run/supervisor.2.ipc state=dialling hello_sent=yes",
    ]


def test_one_that_is_linked_is_not_missed_and_one_that_is_lost_not_at_once() -> None:
    world = World()
    supervisor = world.start(Role.SUPERVISOR)
    scheduler = world.start(Role.SCHEDULER, dial=(supervisor.me.address,))
    watch = SupervisorWatch(SPEC, START)
    world.deliver()
    world.run(SUPERVISOR_WARNING_INTERVAL + 1)
    assert watch.warning(scheduler, world.now) == ""
    world.kill(supervisor)
    world.run(5.0)
    assert not scheduler.peers
    assert watch.warning(scheduler, world.now) == ""
    world.run(SUPERVISOR_WARNING_INTERVAL)
    assert "dialling" in watch.warning(scheduler, world.now)


def test_who_has_no_supervisor_misses_none() -> None:
    scheduler = World().start(Role.SCHEDULER)
    assert SupervisorWatch("", START).warning(scheduler, START + 10 * SUPERVISOR_WARNING_INTERVAL) == ""


def test_a_node_with_a_thread_says_so(directory: str, caplog: pytest.LogCaptureFixture) -> None:
    clock = ScriptedClock()
    node = ThreadNode(alone(Role.SCHEDULER, directory), SchedulerInbox, idle, clock=clock)
    node.start()
    try:
        clock.advance(SUPERVISOR_WARNING_INTERVAL)
        deadline = time.monotonic() + 20
        while "no connection to the supervisor" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        node.close()


async def test_a_node_on_a_loop_says_so(directory: str, caplog: pytest.LogCaptureFixture) -> None:
    clock = ScriptedClock()
    node = AsyncNode(alone(Role.FRONTEND, directory), FrontendInbox, idle, lambda _: None, clock)
    await node.start()
    try:
        clock.advance(SUPERVISOR_WARNING_INTERVAL)
        async with asyncio.timeout(20):
            while "no connection to the supervisor" not in caplog.text:  # it tells nobody  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        await node.close()
