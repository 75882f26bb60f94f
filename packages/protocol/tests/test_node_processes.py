"""Node in a process of its own: heartbeats while the main thread is busy, and its death."""

import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tercet.protocol.messages.messages import Heartbeat
from tercet.protocol.messages.values import Role
from tercet.protocol.node import PeerDown, PeerUp
from tercet.protocol.testing import Listener, Network

FRONTEND, SCHEDULER = Role.FRONTEND, Role.SCHEDULER

CHILD = """
import sys, time
from tercet.protocol.messages.messages import Heartbeat, SchedulerInbox
from tercet.protocol.node import NodeConfig, ThreadNode
from tercet.protocol.messages.values import Phase, Role
config = NodeConfig(Role.SCHEDULER, "scheduler-0", "ipc://" + sys.argv[1])
ThreadNode(config, SchedulerInbox, lambda peer: Heartbeat(phase=Phase.STEP)).start()
print("up", flush=True)
while True:
    sum(i * i for i in range(1000))
"""


@pytest.fixture
def busy_child(network: Network) -> Iterator["subprocess.Popen[str]"]:
    """A scheduler process whose main thread never rests."""
    arguments = [sys.executable, "-c", CHILD, str(network.directory)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        assert child.stdout.readline() == "up\n"
        yield child
        child.kill()


def test_heartbeats_go_on_while_the_main_thread_is_busy(network: Network, busy_child: "subprocess.Popen[str]") -> None:
    frontend = Listener(network.node(FRONTEND, heartbeat_interval=0.25, silence=2.0))
    times = []
    for _ in range(9):
        frontend.wait_for(Heartbeat, "scheduler-0")
        times.append(time.monotonic())
    gaps = sorted(after - before for before, after in itertools.pairwise(times))
    assert gaps[len(gaps) // 2] < 0.5, gaps
    assert gaps[-1] < 2.0, "nobody would call it silent"
    assert busy_child.poll() is None


def test_a_killed_process_is_down_long_before_it_would_count_as_silent(
    network: Network, busy_child: "subprocess.Popen[str]"
) -> None:
    frontend = Listener(network.node(FRONTEND, heartbeat_interval=0.25, silence=20.0))
    frontend.wait_for(Heartbeat, "scheduler-0")
    busy_child.send_signal(signal.SIGKILL)
    start = time.monotonic()
    down = frontend.wait_for(PeerDown).message
    assert down == PeerDown("scheduler-0", SCHEDULER, "its connection broke")
    assert time.monotonic() - start < 2.0
    network.node(SCHEDULER)
    frontend.wait_for(PeerUp, "scheduler-0")
    assert len(list(network.directory.glob("scheduler-0.*"))) == 1, "the next start tidied up"
