"""The listening HTTP socket: inherited from the supervisor, or opened here."""

import ipaddress
import socket

from tercet.frontend.config.config import HttpConfig

BACKLOG = 2048
"""Connections that may wait to be accepted."""


def listening_socket(config: HttpConfig) -> socket.socket:
    """Return the inherited socket, or open one. Raises OSError."""
    fd = config.fd
    if fd is None:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        fd = socket.create_server((config.host, config.port), family=family, backlog=BACKLOG).detach()
    return socket.socket(fileno=fd)  # reads the protocol: asyncio sets TCP_NODELAY only where it is known to be TCP


def is_local(listener: socket.socket) -> bool:
    """Return whether the socket is reachable from this machine only."""
    host = listener.getsockname()[0]
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def url_of(listener: socket.socket) -> str:
    """Return the URL for clients on this machine."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
