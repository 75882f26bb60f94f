"""The limit on client connections, and the eviction of idle ones."""

import asyncio
from typing import Protocol

from tercet.protocol.system.file_limit import raise_file_limit

_OTHERS = 512
"""File descriptors reserved for connections to other processes (five each), grammar workers and files. ZeroMQ aborts
a process that has no descriptor left to accept a connection."""


class Connection(Protocol):
    """A client's connection."""

    transport: asyncio.Transport


class Connections:
    """Idle connections, longest idle first.

    At most `most` connections are open, idle or not. A client that opens many connections cannot lock out others.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._idle: dict[Connection, None] = {}

    def opened(self, connection: Connection, count: int) -> None:
        """Register a new connection, the last of `count`.

        If there are too many, abort the one that was idle longest.
        """
        self.waits(connection)
        if count > self.most:
            longest = next(iter(self._idle))
            self.gone(longest)
            longest.transport.abort()

    def waits(self, connection: Connection) -> None:
        """Mark a connection as idle: the server waits for its client."""
        self._idle[connection] = None

    def works(self, connection: Connection) -> None:
        """Mark a connection as busy: its client waits for the server."""
        self._idle.pop(connection, None)

    gone = works


def room_for_connections() -> int:
    """Return the number of client connections that fit, after raising the file limit of this process.

    Raises ChannelError if the limit is too low to serve at all.
    """
    most = raise_file_limit()
    return max(most - _OTHERS, most // 2)
