"""The limit on client connections, and the eviction of idle ones."""

import asyncio
from typing import Protocol

from tercet.protocol.system.file_limit import raise_file_limit

_RESERVED_FILES = 512
"""File descriptors reserved for connections to other processes (five each), gRPC clients, helpers and files. ZeroMQ
aborts a process that has no descriptor left to accept a connection."""
_MAX_GRPC_CONNECTIONS = 128
"""Maximum connections of gRPC clients, which are few: one has many calls at a time."""


class Connection(Protocol):
    """A client's connection."""

    transport: asyncio.Transport


class ConnectionLimiter:
    """Idle connections, longest idle first.

    At most `limit` connections are open, idle or not. A client that opens many connections cannot lock out others.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._idle: dict[Connection, None] = {}

    def on_opened(self, connection: Connection, count: int) -> None:
        """Register a new connection, the last of `count`.

        If there are too many, abort the one that was idle longest.
        """
        self.mark_idle(connection)
        if count > self.limit:
            longest = next(iter(self._idle))
            self.on_closed(longest)
            longest.transport.abort()

    def mark_idle(self, connection: Connection) -> None:
        """Mark a connection as idle: the server waits for its client."""
        self._idle[connection] = None

    def mark_busy(self, connection: Connection) -> None:
        """Mark a connection as busy: its client waits for the server."""
        self._idle.pop(connection, None)

    on_closed = mark_busy


def max_connections() -> int:
    """Return the number of client connections that fit, after raising the file limit of this process.

    Raises ChannelError if the limit is too low to serve at all.
    """
    limit = raise_file_limit()
    return max(limit - _RESERVED_FILES, limit // 2)


def max_grpc_connections() -> int:
    """Return the number of gRPC connections that fit beside `max_connections`. Raises ChannelError like it."""
    return min(_MAX_GRPC_CONNECTIONS, raise_file_limit() // 8)
