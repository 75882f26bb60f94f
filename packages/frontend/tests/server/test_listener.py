"""The listening socket and its URL."""

import socket

from tercet.frontend.config.config import HttpConfig
from tercet.frontend.server.listener import listening_socket, url_of


def test_a_socket_is_inherited_or_made() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as parent,
        listening_socket(HttpConfig(fd=parent.dup().detach())) as child,
    ):
        assert child.getsockname() == parent.getsockname()
        assert child.proto == socket.IPPROTO_TCP  # else asyncio lets each response wait for the client's delayed ACK
    with listening_socket(HttpConfig(port=0)) as own:
        assert own.proto == socket.IPPROTO_TCP
        assert url_of(own) == f"http://127.0.0.1:{own.getsockname()[1]}"
    with listening_socket(HttpConfig(host="0.0.0.0", port=0)) as everywhere:
        assert url_of(everywhere).startswith("http://127.0.0.1:")
