"""How many connections a server keeps, and which of them make room for a new one."""

import asyncio
import contextlib
import resource
from typing import Protocol

_MOST_FILES = 65_536
"""File descriptors that are asked for: each idle connection takes some kilobytes, too."""
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
    """As many as this process can have, once it may open as many files as it is allowed to ask for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(_MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    most = _MOST_FILES if soft == resource.RLIM_INFINITY else min(_MOST_FILES, soft)
    return max(most - _OTHERS, most // 2)
