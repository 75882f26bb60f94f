"""Health checks as an orchestrator runs them: over ipc and tcp, with a part's own keys, and never for long."""

import time

import pytest

from tercet.protocol.config import NodeConfig
from tercet.protocol.errors import AddressError, ChannelError
from tercet.protocol.messages.messages import Heartbeat, Ready
from tercet.protocol.messages.values import Phase, Role
from tercet.protocol.node import ThreadNode
from tercet.protocol.probe import probe
from tercet.protocol.testing import INBOXES, Network
from tercet.protocol.transport.security import Security

SCHEDULER = Role.SCHEDULER


class Part:
    """Status of a probed scheduler."""

    phase = Phase.IDLE
    step_age = 0.0

    def __call__(self, _: str) -> Heartbeat:
        return Heartbeat(phase=self.phase, step_age=self.step_age, longest_step=1.0)


def test_a_part_lives_then_is_ready_then_drains(network: Network) -> None:
    part = Part()
    node = network.node(SCHEDULER, status=part)
    listen = f"ipc://{network.directory}"
    assert probe(listen, SCHEDULER, live=True, timeout=10)
    assert not probe(listen, SCHEDULER, timeout=0.5)
    node.set_ready(Ready())
    assert probe(listen, SCHEDULER, timeout=10)
    assert probe(node.address, SCHEDULER, timeout=10)
    part.phase = Phase.DRAINING
    assert not probe(listen, SCHEDULER, timeout=0.5)
    assert probe(listen, SCHEDULER, live=True, timeout=10)


def test_a_part_stuck_in_a_step_is_neither_ready_nor_live(network: Network) -> None:
    part = Part()
    node = network.node(SCHEDULER, status=part)
    node.set_ready(Ready())
    part.phase, part.step_age = Phase.STEP, 29.0
    assert probe(node.address, SCHEDULER, live=True, timeout=10), "slow is not stuck"
    assert probe(node.address, SCHEDULER, timeout=10)
    part.step_age = 31.0
    assert not probe(node.address, SCHEDULER, live=True, timeout=0.5)
    assert not probe(node.address, SCHEDULER, timeout=0.5)


def test_nobody_there_is_neither_ready_nor_alive(network: Network) -> None:
    network.node(Role.DETOKENIZER)
    for live in (False, True):
        began = time.monotonic()
        assert not probe(f"ipc://{network.directory}", SCHEDULER, live=live, timeout=0.3)
        assert 0.3 <= time.monotonic() - began < 5


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_a_parts_own_keys_are_enough(keys: dict[Role, Security], host: str) -> None:
    part = Part()
    node = ThreadNode(
        NodeConfig(SCHEDULER, "s", "tcp://0.0.0.0:0", security=keys[SCHEDULER], heartbeat_interval=0.05),
        INBOXES[SCHEDULER],
        part,
    )
    node.start()
    try:
        node.set_ready(Ready())
        address = f"tcp://{host}:{node.address.rpartition(':')[2]}"
        assert probe(address, SCHEDULER, keys[SCHEDULER], timeout=10)
        assert probe(address, SCHEDULER, keys[Role.SUPERVISOR], live=True, timeout=10)
        assert not probe(address, SCHEDULER, keys[Role.FRONTEND], live=True, timeout=0.5), "its role it cannot hide"
        with pytest.raises(AddressError, match="needs keys"):
            probe(address, SCHEDULER)
    finally:
        node.close()


def test_a_probe_disturbs_nobody(network: Network) -> None:
    node = network.node(SCHEDULER)
    node.set_ready(Ready())
    for _ in range(5):
        assert probe(f"ipc://{network.directory}", SCHEDULER, timeout=10)
    end = time.monotonic() + 10
    while node.peers():
        assert time.monotonic() < end, "a probe says Goodbye"
        time.sleep(0.01)
    assert node.counters.get("dropped_undecodable", 0) == 0
    assert not node._core.table.links


def test_on_loopback_a_probe_can_do_without_keys_as_the_part_does() -> None:
    node = ThreadNode(
        NodeConfig(SCHEDULER, "s", "tcp://127.0.0.1:0", insecure_loopback=True), INBOXES[SCHEDULER], Part()
    )
    node.start()
    try:
        assert probe(node.address, SCHEDULER, live=True, timeout=10, insecure_loopback=True)
    finally:
        node.close()


@pytest.mark.parametrize("temporary", ["/tmp/" + "deep" * 20, "/nowhere"])
def test_a_probe_works_whatever_the_directory_for_temporary_files(
    temporary: str, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("TMPDIR", temporary)
    assert not probe(f"ipc://{network.directory}", Role.SCHEDULER, timeout=0.05)


def test_a_probe_that_can_make_no_socket_says_so_in_one_line(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/proc/self")
    with pytest.raises(ChannelError, match="no directory for sockets can be made") as raised:
        probe(f"ipc://{network.directory}", Role.SCHEDULER, timeout=0.05)
    assert "\n" not in str(raised.value)
