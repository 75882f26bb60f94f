"""Health check of a process: connects to it as a peer and reads its heartbeats."""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator

from tercet.protocol.config import Dial, NodeConfig
from tercet.protocol.membership.heartbeat_timer import is_stuck
from tercet.protocol.messages.messages import Heartbeat, SupervisorInbox
from tercet.protocol.messages.values import Phase, Role
from tercet.protocol.node import PeerReady, ThreadNode
from tercet.protocol.system.socket_directory import new_socket_directory
from tercet.protocol.transport.endpoints import Ipc, Reach, Tcp, address_towards, check_spec, parse
from tercet.protocol.transport.security import Security

INTERVAL = 0.1
"""Seconds between heartbeats of the probe itself."""


def probe(
    address: str,
    role: Role,
    security: Security | None = None,
    *,
    live: bool = False,
    timeout: float = 2.0,
    insecure_loopback: bool = False,
) -> bool:
    """Return whether the process of that role at `address` is ready and not draining; with `live`, whether it responds.

    A process that is stuck in a step is neither, although it sends heartbeats.

    `address` is the process's listen address: for an ipc:// directory, any process of the role in it will do.
    `security` may be the process's own keys. Raises AddressError for an address that cannot be dialled, and
    ChannelError if no socket can be opened.
    """
    target = parse(address)
    if isinstance(target, Ipc) and not target.is_pattern and not target.path.endswith(".ipc"):
        address = f"ipc://{target.path.rstrip('/')}/{role.value}-*"
    elif isinstance(target, Tcp) and target.is_wildcard:
        address = str(Tcp("::1" if ":" in target.host else "127.0.0.1", target.port))
    check_spec(address, Reach.ANYWHERE if security else Reach.LOOPBACK if insecure_loopback else Reach.NOWHERE)
    with _node(Dial(role, address), security, insecure_loopback=insecure_loopback) as node:
        ready, taking, end = False, False, time.monotonic() + timeout
        while (left := end - time.monotonic()) > 0:
            for delivery in node.drain(left):
                ready |= isinstance(delivery.message, PeerReady)
                if isinstance(delivery.message, Heartbeat):
                    alive = not is_stuck(delivery.message)
                    taking = alive and delivery.message.phase is not Phase.DRAINING
                    if live and alive:
                        return True
            if ready and taking and not live:
                return True
        return False


@contextlib.contextmanager
def _node(dial: Dial, security: Security | None, *, insecure_loopback: bool) -> Iterator[ThreadNode]:
    """Run a temporary peer with an inbox that the process can reach."""
    with contextlib.ExitStack() as stack:
        if isinstance(parse(dial.spec), Tcp):
            listen = address_towards(dial.spec, "tcp://0.0.0.0:0")
        else:
            directory = new_socket_directory("tercet-probe-")
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
            listen = f"ipc://{directory}"
        config = NodeConfig(
            Role.SUPERVISOR,
            f"probe-{os.urandom(8).hex()}",
            listen,
            connect=(dial,),
            heartbeat_interval=INTERVAL,
            security=security,
            insecure_loopback=insecure_loopback,
        )
        node = ThreadNode(config, SupervisorInbox, lambda _: Heartbeat(phase=Phase.IDLE))
        node.start()
        try:
            yield node
        finally:
            node.close("the probe is over")
