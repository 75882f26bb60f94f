"""Parsing of HTTP/1 for a server that speaks nothing else."""

from collections.abc import Iterable
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser


class OneProtocolParser:
    """httptools' parser, for which an offer to change the protocol is a header like any other (RFC 9110, 7.8).

    Its own would take the request to end there: the body, whatever a client of another has put into it, would be read
    as the next request. Here a parser that knows nothing of the offer goes on with the body. `protocol` is called as
    httptools calls it, but twice for the end of a head that offers: it passes over what comes while `resumes` is set,
    and over the end of a message while `offers` is. What is no HTTP ends in `on_nonsense`.
    """

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self._parser = _parser(protocol)
        self.resumes = False

    @property
    def offers(self) -> bool:
        """Whether the head that has just ended offers another protocol, and its body is still to come."""
        return bool(self._parser.should_upgrade())

    def feed_data(self, data: bytes) -> None:
        """As httptools', but what it raises the protocol is told."""
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
            self._protocol.on_nonsense()

    def get_http_version(self) -> str:
        """Of the present request."""
        return str(self._parser.get_http_version())

    def get_method(self) -> bytes:
        """Of the present request."""
        return bytes(self._parser.get_method())

    def should_keep_alive(self) -> bool:
        """Whether another request may follow the present one."""
        return bool(self._parser.should_keep_alive())

    def should_upgrade(self) -> bool:
        """Nothing is ever changed."""
        return False

    def _resume(self) -> None:
        head = _frame(self._parser, self._protocol.headers)
        self._parser = _parser(self._protocol)
        self.resumes = True
        try:
            self._parser.feed_data(head)
        finally:
            self.resumes = False


def _parser(protocol: Any) -> HttpRequestParser:
    parser = HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does: it drops what comes after the end
    return parser


def _frame(parser: HttpRequestParser, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A head of the same method and version, with what says where its body ends."""
    framing = [b"%b: %b\r\n" % each for each in headers if each[0] in {b"content-length", b"transfer-encoding"}]
    version = str(parser.get_http_version()).encode()
    return b"%b / HTTP/%b\r\n%b\r\n" % (parser.get_method(), version, b"".join(framing))
