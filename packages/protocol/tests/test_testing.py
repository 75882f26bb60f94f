"""The fakes behave as the nodes they stand for."""

import pytest

from tercet.protocol.messages.messages import AbortReq, Ready
from tercet.protocol.messages.values import Role
from tercet.protocol.node import Delivery, PeerUp, Sender
from tercet.protocol.testing import FakeAsyncNode, FakeNode, Listener, Network, ScriptedClock


def test_a_fake_node_is_fed_and_drained() -> None:
    node = FakeNode()
    sender: Sender = node
    node.start()
    up = Delivery("scheduler-0", PeerUp("scheduler-0", Role.SCHEDULER, "a" * 16))
    node.feed(up, up)
    assert node.drain(1.0) == [up, up]
    assert node.drain() == []
    assert node.waits == [1.0, 0]
    assert sender.send("scheduler-0", AbortReq(rid="r"), b"raw")
    node.full.add("scheduler-0")
    assert not sender.send("scheduler-0", AbortReq(rid="s"))
    assert node.take() == [("scheduler-0", AbortReq(rid="r"), (b"raw",))]
    assert node.sent == []
    node.set_ready(Ready())
    node.close("done")
    assert (node.ready, node.closed) == (Ready(), "done")


async def test_a_fake_async_node_delivers_at_once() -> None:
    heard: list[Delivery] = []
    node = FakeAsyncNode(heard.extend)
    await node.start()
    up = Delivery("scheduler-0", PeerUp("scheduler-0", Role.SCHEDULER, "a" * 16))
    node.feed(up)
    assert heard == [up]
    assert node.send("scheduler-0", AbortReq(rid="r"))
    await node.close("done")
    assert (node.started, node.closed) == (True, "done")


def test_a_scripted_clock_moves_by_hand() -> None:
    clock = ScriptedClock(5.0)
    assert clock() == clock() == 5.0
    assert clock.advance(1.5) == 6.5 == clock()


def test_a_listener_says_what_it_heard_instead() -> None:
    with Network() as network:
        frontend = Listener(network.node(Role.FRONTEND))
        network.node(Role.SCHEDULER)
        frontend.wait_for(PeerUp)
        with pytest.raises(TimeoutError, match="no AbortReq within"):
            frontend.wait_for(AbortReq, timeout=0.1)
