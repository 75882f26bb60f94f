"""`ImageFetcher`: files of images, read from the hosts of `--allowed-media-host`.

A URL is parsed once, and its parts go to httpcore as they were checked. The host's name is resolved once, and the
connection goes to an address that was checked. httpcore reads no proxies from the environment, keeps no cookies,
follows no redirect and decompresses nothing.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence, Set
from contextlib import asynccontextmanager
from functools import cached_property
from ssl import SSLContext
from urllib.parse import quote, urlsplit

import httpcore2
from httpcore2 import AsyncHTTPConnection, AsyncNetworkBackend, AsyncNetworkStream, Origin

from tercet.frontend.__about__ import __version__
from tercet.frontend.config.validation import MediaHost
from tercet.frontend.errors import BadRequestError
from tercet.frontend.helper.slots import KeySlots
from tercet.frontend.media.addresses import is_public
from tercet.frontend.media.image_decoder import MAX_FILE_BYTES, ImageSource

MAX_URL = 8192
MAX_VIDEO_BYTES = 25_165_824
"""Maximum bytes of a clip's file."""
_DEFAULT_PORTS = {"http": 80, "https": 443}
_HEADERS = (("User-Agent", f"tercet/{__version__}"), ("Accept", "image/*"), ("Accept-Encoding", "identity"))
_URL_CHARACTERS = "".join(chr(code) for code in range(0x21, 0x7F))
_CONNECT_SECONDS = 3.0
"""Seconds for each of a host's addresses."""
_FAILURES = (httpcore2.TimeoutException, httpcore2.NetworkError, httpcore2.ProtocolError, OSError)

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses of a host. Raises OSError for an unknown one."""


async def resolve(host: str, port: int) -> list[str]:
    """Resolve a name as the machine does."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class _RefusedError(Exception):
    """File that is not read; the message, for the client, completes "the image is refused: "."""


class ImageFetcher:
    """Reader of up to `slots` files at once. Files beyond `max_waiting` are refused.

    A file has `seconds` to arrive, and at most `max_bytes`; a read may ask for less. Tests replace `resolve` and
    `network`.
    """

    def __init__(
        self,
        hosts: Set[MediaHost],
        resolve: Resolve = resolve,
        network: AsyncNetworkBackend | None = None,
        *,
        slots: int = 8,
        max_waiting: int = 64,
        seconds: float = 10.0,
        max_bytes: int = MAX_VIDEO_BYTES,
    ) -> None:
        self._hosts = hosts
        self._network = _PublicNetwork(resolve, network or httpcore2.AnyIOBackend())
        self._slots = KeySlots(slots, max_waiting, "images")
        self._seconds = seconds
        self._max_bytes = max_bytes

    @asynccontextmanager
    async def file(
        self, source: ImageSource, noun: str = "image", max_bytes: int = MAX_FILE_BYTES
    ) -> AsyncIterator[bytes]:
        """Read a file, and hold its slot while it is used, so that slots bound memory, too. Raises ApiError."""
        try:
            origin, target = self._place(source.url)
            async with self._slots.slot():
                yield await self._read(origin, target, min(max_bytes, self._max_bytes))
        except _RefusedError as error:
            raise BadRequestError(
                f"The {noun} is refused: {error}.", param=source.param, code=f"invalid_{noun}_url"
            ) from None

    def _place(self, url: str) -> tuple[Origin, str]:
        """Parse a URL of an allowed host. Raises _RefusedError."""
        if len(url) > MAX_URL or not url.isprintable() or any(each in url for each in " \\"):
            raise _RefusedError(f"its URL has more than {MAX_URL} characters, or characters that no URL has")
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
        except ValueError:
            raise _RefusedError("its URL cannot be read") from None
        if "@" in parts.netloc:
            raise _RefusedError("its URL has a user name")
        default = _DEFAULT_PORTS[parts.scheme]
        port = default if port is None else port
        if not (MediaHost(host, port) in self._hosts or (port == default and MediaHost(host) in self._hosts)):
            raise _RefusedError("its host is not one of those that --allowed-media-host names")
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        origin = Origin(parts.scheme.encode(), host.encode("ascii"), port)
        return origin, quote(target, safe=_URL_CHARACTERS)

    async def _read(self, origin: Origin, target: str, max_bytes: int) -> bytes:
        tls = self._tls if origin.scheme == b"https" else None
        url = httpcore2.URL(scheme=origin.scheme, host=origin.host, port=origin.port, target=target)
        connection = AsyncHTTPConnection(origin, tls, network_backend=self._network)
        try:
            async with (
                asyncio.timeout(self._seconds),
                connection,
                connection.stream("GET", url, headers=_HEADERS) as response,
            ):
                if 300 <= response.status < 400:
                    raise _RefusedError("its host redirects to another URL, which is not followed")
                if response.status != 200:
                    raise _RefusedError(f"its host answers with status {response.status}")
                return await _content(response, max_bytes)
        except TimeoutError:
            raise _RefusedError(f"its host takes more than {self._seconds:g} s") from None
        except _FAILURES:
            raise _RefusedError("its host cannot be reached, or does not answer as HTTP/1.1 wants it") from None

    @cached_property
    def _tls(self) -> SSLContext:
        return httpcore2.default_ssl_context()


async def _content(response: httpcore2.Response, max_bytes: int) -> bytes:
    content = bytearray()
    async for chunk in response.aiter_stream():
        content += chunk
        if len(content) > max_bytes:
            raise _RefusedError(f"its file has more than {max_bytes} bytes")
        await asyncio.sleep(0)  # many small chunks may have come at once
    return bytes(content)


class _PublicNetwork(AsyncNetworkBackend):
    """Network that connects to hosts whose addresses are all public."""

    def __init__(self, resolve: Resolve, network: AsyncNetworkBackend) -> None:
        self._resolve = resolve
        self._network = network

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ARG002, ASYNC109 - `ImageFetcher` has a timeout for the whole
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> AsyncNetworkStream:
        """Connect to the first address of a host that answers."""
        addresses = await self._resolve(host, port)
        if not all(map(is_public, addresses)):
            raise _RefusedError("its host has an address that is not public")
        for address in addresses:
            try:
                return await self._network.connect_tcp(address, port, _CONNECT_SECONDS, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout):
                continue
        raise httpcore2.ConnectError
