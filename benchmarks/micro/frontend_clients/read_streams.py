"""Streaming clients in a process of their own, so that what they cost is not counted as somebody else's delay.

python read_streams.py PORT STREAMS REPEATS SPREAD: for each line on standard input, a JSON body, every client asks for
it REPEATS times, each time when the answer before has ended; the clients begin evenly over SPREAD seconds. The answer
is one line of JSON: chunks, tokens, and the delays in seconds of what was read while all clients had a stream. Tokens
are texts like <12.345678>, the time they were sent at by the monotonic clock, which on Linux all processes share.

It never sleeps: a reader that does has to be woken by each `send` of the server's, which then pays for it.
"""

import json
import re
import selectors
import socket
import sys
import time

_STAMP = re.compile(rb"<([0-9.]+)>")
_END = b"0\r\n\r\n"
"""What ends a body in chunks."""


class Clients:
    """One round. While it lasts bytes are only kept, with the time they came at."""

    def __init__(self, port: int, streams: int, repeats: int, body: bytes) -> None:
        self._port = port
        self._left = [repeats] * streams
        self._head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode()
        self._body = body
        self._selector = selectors.EpollSelector()
        self._reads: list[tuple[float, bytes]] = []
        self._open = 0
        self._all_since = 0.0
        self._all_until = float("inf")

    def run(self, spread: float) -> dict[str, object]:
        """Every stream, from its request to its end."""
        began, streams = time.monotonic(), len(self._left)
        due = [began + spread * client / streams for client in range(streams)]
        begun = 0
        while begun < streams or self._open:
            while begun < streams and time.monotonic() >= due[begun]:
                self._ask(begun)
                begun += 1
                self._all_since = time.monotonic()
            for key, _ in self._selector.select(0):
                assert isinstance(key.fileobj, socket.socket)
                self._read(key.fileobj, key.data)
        self._selector.close()
        return self._counts()

    def _ask(self, client: int) -> None:
        connection = socket.create_connection(("127.0.0.1", self._port))
        connection.sendall(self._head + self._body)
        self._selector.register(connection, selectors.EVENT_READ, client)
        self._open += 1
        self._left[client] -= 1

    def _read(self, connection: socket.socket, client: int) -> None:
        data = connection.recv(1 << 16)
        self._reads.append((time.monotonic(), data))
        if data and not data.endswith(_END):
            return
        self._selector.unregister(connection)
        connection.close()
        self._open -= 1
        if self._left[client]:
            self._ask(client)
        else:
            self._all_until = min(self._all_until, time.monotonic())

    def _counts(self) -> dict[str, object]:
        stamps = [(came, _STAMP.findall(data)) for came, data in self._reads]
        return {
            "chunks": sum(data.count(b"data: ") for _, data in self._reads),
            "tokens": sum(len(sent) for _, sent in stamps),
            "delays": [
                came - float(sent[0]) for came, sent in stamps if sent and self._all_since < came < self._all_until
            ],
        }


def main(port: str, streams: str, repeats: str, spread: str) -> None:
    """Rounds until standard input ends."""
    for line in sys.stdin:
        clients = Clients(int(port), int(streams), int(repeats), line.strip().encode())
        print(json.dumps(clients.run(float(spread))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
