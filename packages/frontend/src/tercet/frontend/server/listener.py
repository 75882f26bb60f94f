"""The socket that HTTP comes to: inherited from the supervisor, or one of our own, and where clients reach it."""

import ipaddress
import socket

from tercet.frontend.config.config import HttpConfig

BACKLOG = 2048
"""Connections that may wait to be accepted."""


def listening_socket(config: HttpConfig) -> socket.socket:
    """The inherited socket, or one of our own. Raises OSError."""
    if config.fd is not None:
        return socket.socket(fileno=config.fd)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    return socket.create_server((config.host, config.port), family=family, backlog=BACKLOG)


def is_local(listener: socket.socket) -> bool:
    """Whether only this machine reaches it."""
    host = listener.getsockname()[0]
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def url_of(listener: socket.socket) -> str:
    """Where clients on this machine reach it."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
