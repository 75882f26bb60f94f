"""How many connections a server keeps, and which of them make room for a new one."""

import asyncio
from typing import Protocol

from tercet.protocol.system.file_limit import raise_file_limit

_OTHERS = 512
"""File descriptors that are left to the other parts' connections, each of which takes five, grammar workers and files:
ZeroMQ ends a process that cannot take a connection of theirs."""


class Connection(Protocol):
    """One of a client's."""

    transport: asyncio.Transport


class Connections:
    """Those without a request that is whole and unanswered, from the one that has waited longest for it on.

    There are `most` at a time, these and others. One client that holds connections open shuts nobody else out.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._idle: dict[Connection, None] = {}

    def opened(self, connection: Connection, count: int) -> None:
        """The last of now `count` connections: if they are too many, one that waits is ended, be it this one."""
        self.waits(connection)
        if count > self.most:
            longest = next(iter(self._idle))
            self.gone(longest)
            longest.transport.abort()

    def waits(self, connection: Connection) -> None:
        """It is the client's turn."""
        self._idle[connection] = None

    def works(self, connection: Connection) -> None:
        """It is the server's turn."""
        self._idle.pop(connection, None)

    gone = works


def room_for_connections() -> int:
    """How many connections of clients this process can have, once it may open as many files as it can ask for.

    Raises ChannelError where it may open too few files to serve at all.
    """
    most = raise_file_limit()
    return max(most - _OTHERS, most // 2)
