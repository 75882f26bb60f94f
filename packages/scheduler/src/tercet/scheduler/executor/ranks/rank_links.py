"""Links from a parent to its ranks: one socket each, in their private directory."""

import select
from collections.abc import Iterable
from pathlib import Path

import zmq

from tercet.protocol.transport.channel import Bounds, Connection, Context, Inbox, Outbox
from tercet.protocol.transport.poller import Poller
from tercet.scheduler.executor.rank_strategy import RankError
from tercet.scheduler.executor.ranks.rank_messages import Order, decode_order

_BOUNDS = Bounds(queue=32)
"""Maximum queued orders: rank 0 plans a few steps ahead of its own computation."""
_PAUSE = 60.0
"""Seconds between polls; events end the wait earlier."""


def address_of(directory: Path, rank: int) -> str:
    """Return the address at which a rank receives orders."""
    return f"ipc://{directory}/rank-{rank}.ipc"


class PlanSender:
    """The parent's end of the links. It belongs to one thread."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self._context: Context = zmq.Context()
        self._outboxes = [Outbox(self._context, address, _BOUNDS) for address in addresses]
        self._absent = [*self._outboxes]

    def all_listen(self) -> bool:
        """Return whether every rank listens."""
        while self._absent and self._absent[0].connection_change() is Connection.UP:
            del self._absent[0]
        return not self._absent

    def wait_for_all(self) -> None:
        """Wait until every rank listens. The caller's process watchers notice ranks that never will."""
        while not self.all_listen():
            select.select([self._absent[0].monitor], [], [], _PAUSE)

    def send(self, frame: bytes) -> None:
        """Send an encoded order to all ranks. Raise RankError if a rank is gone or too far behind."""
        for outbox in self._outboxes:
            if not outbox.send([frame]):
                raise RankError(f"{outbox.address} takes no more orders")

    def close(self) -> None:
        """Close the sockets; queued orders are lost."""
        for outbox in self._outboxes:
            outbox.close()
        self._context.term()


class PlanReceiver:
    """Another rank's end of the link. It belongs to one thread."""

    def __init__(self, address: str) -> None:
        """Bind the socket. Raise ChannelError if that fails."""
        self._context: Context = zmq.Context()
        self._inbox = Inbox(self._context, address, _BOUNDS)
        self._waiter = Poller(self._inbox.filenos())

    def next(self) -> Order:
        """Wait for an order. Raise DecodeError for an invalid one."""
        while (received := self._inbox.receive()) is None:
            self._waiter.wait(_PAUSE)
        return decode_order(b"".join(received.frames))

    def close(self) -> None:
        """Close the socket."""
        self._waiter.close()
        self._inbox.close()
        self._context.term()
