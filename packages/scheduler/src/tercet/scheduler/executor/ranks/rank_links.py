"""How rank 0's orders reach its followers: a socket to each, in the private directory where they meet."""

import select
from collections.abc import Iterable
from pathlib import Path

import zmq

from tercet.protocol.transport.channel import Bounds, Connection, Context, Inbox, Outbox
from tercet.protocol.transport.poller import Poller
from tercet.scheduler.executor.rank_strategy import RankError
from tercet.scheduler.executor.ranks.rank_messages import Order, decode_order, encode_order

_BOUNDS = Bounds(queue=8)
"""Orders that may wait: rank 0 itself is at most two steps ahead of what it computes."""
_PAUSE = 60.0
"""Seconds between looks for what wakes us anyway."""


def address_of(directory: Path, rank: int) -> str:
    """Where a follower takes orders."""
    return f"ipc://{directory}/rank-{rank}.ipc"


class PlanSender:
    """Rank 0's side. Belongs to one thread."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self._context: Context = zmq.Context()
        self._outboxes = [Outbox(self._context, address, _BOUNDS) for address in addresses]

    def wait_for_all(self) -> None:
        """Until every follower listens. Whoever starts them notices one that never will."""
        for outbox in self._outboxes:
            while outbox.connection_change() is not Connection.UP:
                select.select([outbox.monitor], [], [], _PAUSE)

    def give(self, order: Order) -> None:
        """Send an order to all. Raises RankError where one is gone, or too far behind ever to come after."""
        frame = encode_order(order)
        for outbox in self._outboxes:
            if not outbox.send([frame]):
                raise RankError(f"{outbox.address} takes no more orders")

    def close(self) -> None:
        """Send nothing more; what is under way is lost."""
        for outbox in self._outboxes:
            outbox.close()
        self._context.term()


class PlanReceiver:
    """A follower's side. Belongs to one thread."""

    def __init__(self, address: str) -> None:
        """Raises ChannelError where nothing can listen there."""
        self._context: Context = zmq.Context()
        self._inbox = Inbox(self._context, address, _BOUNDS)
        self._waiter = Poller(self._inbox.filenos())

    def next(self) -> Order:
        """Wait for an order. Raises DecodeError for what is none."""
        while (received := self._inbox.receive()) is None:
            self._waiter.wait(_PAUSE)
        return decode_order(b"".join(received.frames))

    def close(self) -> None:
        """Take nothing more."""
        self._waiter.close()
        self._inbox.close()
        self._context.term()
