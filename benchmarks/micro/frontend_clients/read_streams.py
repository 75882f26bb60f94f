"""Streaming clients in a process of their own, so that their cost does not delay the frontend.

python read_streams.py PORT STREAMS REPEATS SPREAD: for each line on standard input, a JSON body, every client sends it
REPEATS times, each after the end of the previous answer; the clients start evenly over SPREAD seconds. The result is
one line of JSON: chunks, tokens, and the delays in seconds of tokens read while all clients had a stream. Tokens are
texts like <12.345678>, the time at which they were sent by the monotonic clock, which all processes share on Linux.

It never sleeps: each `send` of the server would have to wake a sleeping reader, and the server would pay for it.
"""

import json
import re
import selectors
import socket
import sys
import time

_STAMP = re.compile(rb"<([0-9.]+)>")
_END = b"0\r\n\r\n"
"""End of a chunked body."""


class Clients:
    """Clients of one round. During the round bytes are only stored, with their arrival times."""

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
        """Read every stream from its request to its end."""
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
    """Run rounds until standard input ends."""
    for line in sys.stdin:
        clients = Clients(int(port), int(streams), int(repeats), line.strip().encode())
        print(json.dumps(clients.run(float(spread))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
