"""A node on an asyncio loop: everything arrives, in order, and the loop stays free for others."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from tercet.protocol.aio import BATCH, AsyncNode
from tercet.protocol.errors import ChannelError
from tercet.protocol.messages.messages import AbortReq, BatchStrOutput, FrontendInbox, Heartbeat, Ready
from tercet.protocol.messages.values import Phase, Role
from tercet.protocol.node import Delivery, PeerDown, PeerReady, PeerUp
from tercet.protocol.testing import Listener, Network


class Frontend:
    """AsyncNode with the deliveries it got."""

    def __init__(self, network: Network) -> None:
        self.heard: list[Delivery] = []
        self._news = asyncio.Event()
        config = network.config(Role.FRONTEND)
        self.node = AsyncNode(config, FrontendInbox, lambda _: Heartbeat(phase=Phase.IDLE), self._take)

    def _take(self, deliveries: list[Delivery]) -> None:
        self.heard += deliveries
        self._news.set()

    async def until(self, holds: Callable[[list[Delivery]], bool]) -> None:
        async with asyncio.timeout(20):
            while not holds(self.heard):
                self._news.clear()
                await self._news.wait()

    async def until_heard(self, kind: type[object]) -> None:
        await self.until(lambda heard: any(isinstance(delivery.message, kind) for delivery in heard))


def batch(number: int) -> BatchStrOutput:
    return BatchStrOutput(
        rids=[str(number)], indices=b"", attempts=b"", positions=b"", offsets=b"", token_ids=b"", texts=["x"]
    )


@pytest.fixture
async def network() -> AsyncIterator[Network]:
    with Network() as network:
        yield network


@pytest.fixture
async def frontend(network: Network) -> AsyncIterator[Frontend]:
    frontend = Frontend(network)
    await frontend.node.start()
    yield frontend
    await frontend.node.close("the test is over")


async def test_it_meets_sends_hears_and_parts(network: Network, frontend: Frontend) -> None:
    scheduler = network.node(Role.SCHEDULER)
    await frontend.until_heard(PeerUp)
    assert frontend.node.send("scheduler-0", AbortReq(rid="r"), b"raw")
    scheduler.set_ready(Ready())
    await frontend.until_heard(PeerReady)
    frontend.node.set_ready(Ready(url="http://here"))
    await frontend.until_heard(Heartbeat)
    at_scheduler = Listener(scheduler)
    delivery = await asyncio.to_thread(at_scheduler.wait_for, AbortReq)
    assert bytes(delivery.frames[0]) == b"raw"
    ready = (await asyncio.to_thread(at_scheduler.wait_for, PeerReady)).message
    assert ready == PeerReady("frontend-0", Role.FRONTEND, Ready(url="http://here"))
    assert [info.peer for info in frontend.node.peers()] == ["scheduler-0"]
    scheduler.close("maintenance")
    await frontend.until_heard(PeerDown)
    assert frontend.node.peers() == []


async def test_a_flood_arrives_whole_and_leaves_the_loop_to_others(network: Network, frontend: Frontend) -> None:
    detokenizer = network.node(Role.DETOKENIZER)
    await frontend.until_heard(PeerUp)
    await asyncio.to_thread(Listener(detokenizer).wait_for, PeerUp, "frontend-0")
    total, done = 20_000, False
    last = batch(total - 1)
    turns = [len(frontend.heard)]

    def flood() -> None:
        for number in range(total):
            while not detokenizer.send("frontend-0", batch(number)):
                time.sleep(0.0005)

    async def others() -> None:
        while not done:
            turns.append(len(frontend.heard))
            await asyncio.sleep(0)

    watch = asyncio.create_task(others())
    await asyncio.to_thread(flood)
    await frontend.until(lambda heard: any(delivery.message == last for delivery in heard[-5:]))
    done = True
    await watch
    rids = [delivery.message.rids[0] for delivery in frontend.heard if isinstance(delivery.message, BatchStrOutput)]
    assert rids == list(map(str, range(total)))
    assert max(after - before for before, after in pairwise(turns)) <= 3 * BATCH, "others run between batches"


async def test_closing_twice_and_sending_afterwards_are_harmless(network: Network, frontend: Frontend) -> None:
    network.node(Role.SCHEDULER)
    await frontend.until_heard(PeerUp)
    await frontend.node.close("first")
    await frontend.node.close("second")
    assert not frontend.node.send("scheduler-0", AbortReq(rid="r"))
    assert not [path for path in network.directory.iterdir() if path.name.startswith("frontend")]


async def test_closing_in_the_loop_says_goodbye_and_needs_no_thread(network: Network, frontend: Frontend) -> None:
    scheduler = Listener(network.node(Role.SCHEDULER))
    await frontend.until_heard(PeerUp)
    executor = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(executor)
    executor.shutdown()
    frontend.node.close_now("first")
    frontend.node.close_now("second")
    down = scheduler.wait_for(PeerDown, "frontend-0").message
    assert isinstance(down, PeerDown)
    assert "first" in down.reason
    assert not [path for path in network.directory.iterdir() if path.name.startswith("frontend")]


async def test_a_failing_receiver_does_not_silence_the_node(network: Network) -> None:
    def fail(_: list[Delivery]) -> None:
        raise ZeroDivisionError

    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context.get("exception")))
    node = AsyncNode(network.config(Role.FRONTEND), FrontendInbox, lambda _: Heartbeat(phase=Phase.IDLE), fail)
    await node.start()
    scheduler = Listener(network.node(Role.SCHEDULER))
    for _ in range(10):
        await asyncio.to_thread(scheduler.wait_for, Heartbeat, "frontend-0")
    assert errors, "and it is not hushed up"
    await node.close()


async def test_a_directory_that_cannot_be_used_fails_the_start(network: Network) -> None:
    network.directory.mkdir()
    network.directory.chmod(0o777)
    frontend = Frontend(network)
    with pytest.raises(ChannelError):
        await frontend.node.start()
    await frontend.node.close()


async def test_a_failed_turn_loses_no_deliveries(network: Network) -> None:
    failing = False

    def status(_: str) -> Heartbeat:
        nonlocal failing
        if failing:
            failing = False
            raise ZeroDivisionError
        return Heartbeat(phase=Phase.STEP)

    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context.get("exception")))
    heard: list[Delivery] = []
    config = network.config(Role.FRONTEND, silence=30.0)
    node = AsyncNode(config, FrontendInbox, status, heard.extend)
    await node.start()
    # The other side sends nothing: only the node's own timer can cause its next pass.
    other = network.node(Role.SCHEDULER, heartbeat_interval=30.0, silence=90.0)
    scheduler = Listener(other)
    await asyncio.to_thread(scheduler.wait_for, Heartbeat, "frontend-0")
    failing, sent = True, 0
    while not errors:
        sent += other.send("frontend-0", batch(sent))
        await asyncio.sleep(0.001)
    for _ in range(5):
        await asyncio.to_thread(scheduler.wait_for, Heartbeat, "frontend-0")
    assert len(errors) == 1
    assert sum(isinstance(delivery.message, BatchStrOutput) for delivery in heard) == sent
    await node.close()


async def test_a_loop_that_is_busy_for_long_is_not_called_dead(network: Network, frontend: Frontend) -> None:
    """Heartbeats go on, and report the duration of the stall."""
    scheduler = Listener(network.node(Role.SCHEDULER))
    await frontend.until_heard(PeerUp)
    await asyncio.to_thread(scheduler.wait_for, Heartbeat, "frontend-0")
    silence = network.config(Role.FRONTEND).silence
    time.sleep(1.5 * silence)  # noqa: ASYNC251
    await asyncio.to_thread(scheduler.wait_for, Heartbeat, "frontend-0")
    await asyncio.to_thread(scheduler.node.drain, silence / 2)
    assert not [each for each in scheduler.heard if isinstance(each.message, PeerDown)]
    beats = [each.message for each in scheduler.heard if isinstance(each.message, Heartbeat)]
    ages = [beat.step_age for beat in beats if beat.step_age]
    assert ages == sorted(ages)
    assert {beat.phase for beat in beats if beat.step_age} == {Phase.STEP}
    assert 0.5 * silence < ages[-1] < 2 * silence
