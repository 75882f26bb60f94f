"""Hosts of images: names, addresses, and a local server in the place of every address."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import httpcore2

PUBLIC = "93.184.215.14"
Respond = Callable[[asyncio.StreamWriter], Awaitable[None]]


def response(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    head = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*head, "", ""]).encode() + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass
class Internet(httpcore2.AsyncNetworkBackend):
    """Network whose addresses are all served by one local server."""

    respond: bytes | Respond
    addresses: Sequence[Sequence[str]]
    """Addresses that the first, second, ... lookup finds; the last is repeated."""
    dead: frozenset[str] = frozenset()
    lookups: list[str] = field(default_factory=list)
    connected: list[tuple[str, int]] = field(default_factory=list)
    heads: list[bytes] = field(default_factory=list)
    tls_names: list[str | None] = field(default_factory=list)
    port: int = 0

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        self.lookups.append(host)
        return self.addresses[min(len(self.lookups), len(self.addresses)) - 1]

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        self.connected.append((host, port))
        if host in self.dead:
            raise httpcore2.ConnectError
        stream = await httpcore2.AnyIOBackend().connect_tcp(
            "127.0.0.1", self.port, timeout, local_address, socket_options
        )
        return Stream(stream, self) if port == 443 else stream

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.heads.append(await reader.readuntil(b"\r\n\r\n"))
            if isinstance(self.respond, bytes):
                writer.write(self.respond)
            else:
                await self.respond(writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


class Stream(httpcore2.AsyncNetworkStream):
    """Stream that notes the name in a TLS handshake, and ends there."""

    def __init__(self, stream: httpcore2.AsyncNetworkStream, internet: Internet) -> None:
        self._stream = stream
        self._internet = internet

    async def start_tls(
        self,
        ssl_context: object,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> httpcore2.AsyncNetworkStream:
        assert ssl_context is not None
        self._internet.tls_names.append(server_hostname)
        await self._stream.aclose()
        raise httpcore2.ConnectError


@contextlib.asynccontextmanager
async def internet(respond: bytes | Respond = response(b""), *addresses: Sequence[str]) -> AsyncIterator[Internet]:
    """Serve on a free port while the block runs."""
    made = Internet(respond, addresses or ((PUBLIC,),))
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
