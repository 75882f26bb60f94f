"""HTTP/1 parser that ignores offers to upgrade the protocol."""

from collections.abc import Iterable
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser


class NoUpgradeParser:
    """Wrapper of httptools' parser that treats `Upgrade` like any other header (RFC 9110, 7.8).

    httptools ends a request at the offer, so that the body, which may come from another client, would be
    parsed as the next request. Here a second parser that has not seen the offer continues with the body. `protocol`
    gets httptools' callbacks, some twice for a head with an offer: it ignores those that come while `resuming` is set,
    and the end of a message while `offers_upgrade` is true. Invalid HTTP calls `on_invalid_http`.
    """

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self._parser = _parser(protocol)
        self.resuming = False

    @property
    def offers_upgrade(self) -> bool:
        """Return whether the head that just ended offers another protocol, and its body is still to come."""
        return bool(self._parser.should_upgrade())

    def feed_data(self, data: bytes) -> None:
        """Feed bytes to the parser. Invalid HTTP calls `on_invalid_http` and raises nothing."""
        rest = memoryview(data)
        try:
            while True:
                try:
                    self._parser.feed_data(rest)
                except HttpParserUpgrade as offer:
                    rest = rest[offer.args[0] :]
                    self._resume()
                else:
                    return
        except HttpParserError:
            self._protocol.on_invalid_http()

    def get_http_version(self) -> str:
        return str(self._parser.get_http_version())

    def get_method(self) -> bytes:
        return bytes(self._parser.get_method())

    def should_keep_alive(self) -> bool:
        """Return whether another request may follow the current one."""
        return bool(self._parser.should_keep_alive())

    def should_upgrade(self) -> bool:
        """Return False: the protocol is never upgraded."""
        return False

    def _resume(self) -> None:
        head = _framing_head(self._parser, self._protocol.headers)
        self._parser = _parser(self._protocol)
        self.resuming = True
        try:
            self._parser.feed_data(head)
        finally:
            self.resuming = False


def _parser(protocol: Any) -> HttpRequestParser:
    parser = HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as in uvicorn: data after the end is dropped
    return parser


def _framing_head(parser: HttpRequestParser, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a head of the same method and version, with only the headers that frame the body."""
    framing = [b"%b: %b\r\n" % each for each in headers if each[0] in {b"content-length", b"transfer-encoding"}]
    version = str(parser.get_http_version()).encode()
    return b"%b / HTTP/%b\r\n%b\r\n" % (parser.get_method(), version, b"".join(framing))
