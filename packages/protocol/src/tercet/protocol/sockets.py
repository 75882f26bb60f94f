"""Sockets of one node: its inbox, an outbox to each address, and the poller that waits for all of them."""

from collections.abc import Iterator

import zmq

from tercet.protocol.config import NodeConfig
from tercet.protocol.errors import ProtocolError
from tercet.protocol.messages.values import Role
from tercet.protocol.transport.channel import Bounds, Connection, Context, Inbox, Outbox
from tercet.protocol.transport.endpoints import bind_address
from tercet.protocol.transport.poller import Poller

GOODBYE_TIME = 0.2
"""Seconds that a Goodbye gets to leave before the sockets close."""


class Sockets:
    """Sockets of one node. They belong to one thread, except `counters`, `poller.wake` and sending.

    Raises ChannelError or AddressError.
    """

    def __init__(self, config: NodeConfig, incarnation: str) -> None:
        self._security = config.security
        self._bounds = Bounds(queue=config.queue)
        self._context: Context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 8 * config.max_peers + 64)
        self._outboxes: dict[str, Outbox] = {}
        try:
            address = bind_address(config.listen, config.peer, incarnation, config.reach)
            self.inbox = Inbox(self._context, address, self._bounds, config.security)
        except ProtocolError:
            self._context.term()
            raise
        self.poller = Poller(self.inbox.filenos())

    def find(self, address: str) -> Outbox | None:
        """Return the outbox to an address, or None if it is not open."""
        return self._outboxes.get(address)

    def outbox(self, address: str, key: Role | None) -> Outbox:
        """Return the outbox to an address; a new one expects this role's key there.

        Raises AddressError, and ZMQError or OSError when descriptors run out.
        """
        if address not in self._outboxes:
            outbox = Outbox(self._context, address, self._bounds, self._security, key)
            try:
                self.poller.watch(outbox.monitor)
            except OSError:
                outbox.close()
                raise
            self._outboxes[address] = outbox
        return self._outboxes[address]

    def changes(self) -> Iterator[tuple[str, Connection]]:
        """Yield the addresses whose connections changed since the last call, with their last change."""
        for address, outbox in list(self._outboxes.items()):
            if (change := outbox.connection_change()) is not None:
                yield address, change

    def drop(self, address: str, linger: float = 0) -> dict[str, int]:
        """Close the outbox to an address, if there is one; return its counters."""
        outbox = self._outboxes.pop(address, None)
        if outbox is None:
            return {}
        self.poller.unwatch(outbox.monitor)
        outbox.close(linger)
        return outbox.counters

    def counters(self) -> list[dict[str, int]]:
        """Return the counters of every outbox. Thread-safe."""
        return [outbox.counters for outbox in list(self._outboxes.values())]

    def close(self) -> list[dict[str, int]]:
        """Close all sockets after a moment for queued messages to leave; return the counters of the outboxes."""
        counters = [self.drop(address, GOODBYE_TIME) for address in list(self._outboxes)]
        self.poller.close()
        self.inbox.close()
        self._context.term()
        return counters
