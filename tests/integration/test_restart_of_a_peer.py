"""A restarted peer may connect at the very moment in which the death of its predecessor is noticed."""

import random
from collections.abc import Iterator

import pytest

from tercet.protocol.config import NodeConfig
from tercet.protocol.membership.events import Delivery, PeerDown, PeerUp
from tercet.protocol.membership.links import LinkState
from tercet.protocol.messages.messages import Heartbeat, SupervisorInbox
from tercet.protocol.messages.values import Phase, Role
from tercet.protocol.testing import ScriptedClock
from tests.simulated_network import Network, SimulatedNode

DIRECTORY = "ipc:///simulated"
STEP = 0.005
"""In seconds."""


class Pair:
    """Scheduler, and a frontend that can be restarted. Only the named nodes get a turn."""

    def __init__(self) -> None:
        self.clock = ScriptedClock()
        self.network = Network(random.Random(1))
        self.scheduler = self._board(NodeConfig(Role.SCHEDULER, "scheduler-0", DIRECTORY))
        self.frontend = self.start()
        self.news: list[PeerUp | PeerDown] = []

    def start(self) -> SimulatedNode:
        specs = (f"{DIRECTORY}/scheduler-*",)
        return self._board(NodeConfig(Role.FRONTEND, "frontend-0", DIRECTORY, connect=specs))

    def pass_time(self, seconds: float, *boards: SimulatedNode) -> None:
        for _ in range(round(seconds / STEP)):
            self.clock.advance(STEP)
            self.network.tick()
            for board in boards:
                self.turn(board)

    def turn(self, board: SimulatedNode) -> None:
        board.wait(0)
        deliveries = [*board.receive(100)[0], *board.tick()]
        if board is self.scheduler:
            self.news += _events(deliveries)

    def _board(self, config: NodeConfig) -> SimulatedNode:
        def status(peer: str) -> Heartbeat:
            return Heartbeat(phase=Phase.IDLE)

        board = SimulatedNode(self.network, config, SupervisorInbox, status, None, self.clock)
        board.open()
        return board


def _events(deliveries: list[Delivery]) -> Iterator[PeerUp | PeerDown]:
    for delivery in deliveries:
        if isinstance(delivery.message, PeerUp | PeerDown):
            yield delivery.message


@pytest.mark.parametrize("busy", [round(STEP * steps, 3) for steps in range(0, 60, 2)])
def test_a_peer_that_was_restarted_can_be_sent_to(busy: float) -> None:
    """The sender is busy for a while, just after it has read the first Hello."""
    pair = Pair()
    pair.pass_time(1.0, pair.frontend, pair.scheduler)
    pair.frontend.die()
    pair.pass_time(2 * STEP, pair.scheduler)
    pair.frontend = pair.start()
    while not any(link.state is LinkState.ANSWERING for link in pair.scheduler.table.links.values()):
        pair.pass_time(STEP, pair.frontend, pair.scheduler)
    pair.pass_time(busy, pair.frontend)
    pair.pass_time(1.0, pair.frontend, pair.scheduler)
    assert [type(each) for each in pair.news] == [PeerUp, PeerDown, PeerUp]
    assert pair.scheduler.send("frontend-0", Heartbeat(phase=Phase.IDLE))
