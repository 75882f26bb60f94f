"""Streaming clients in a process of their own, so that what they cost is not counted as somebody else's delay.

python read_streams.py PORT STREAMS: for each line on standard input, a JSON body, all streams ask for it at once and
are read to their ends. The answer is one line of JSON: chunks, tokens, and each read's delay in seconds. Tokens are
texts like <12.345678>, the time they were sent at by the monotonic clock, which on Linux all processes share.
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


def read_all(port: int, streams: int, body: bytes) -> dict[str, object]:
    """One round. While it lasts bytes are only kept, with the time they came at."""
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()
    reads: list[tuple[float, bytes]] = []
    with selectors.EpollSelector() as selector:
        for _ in range(streams):
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(head + body)
            selector.register(connection, selectors.EVENT_READ)
        open_ones = streams
        while open_ones:
            for key, _ in selector.select():
                assert isinstance(key.fileobj, socket.socket)
                data = key.fileobj.recv(1 << 16)
                reads.append((time.monotonic(), data))
                if not data or data.endswith(_END):
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
                    open_ones -= 1
    chunks = sum(data.count(b"data: ") for _, data in reads)
    stamps = [(came, _STAMP.findall(data)) for came, data in reads]
    return {
        "chunks": chunks,
        "tokens": sum(len(sent) for _, sent in stamps),
        "delays": [came - float(sent[0]) for came, sent in stamps if sent],
    }


def main(port: str, streams: str) -> None:
    """Rounds until standard input ends."""
    for line in sys.stdin:
        print(json.dumps(read_all(int(port), int(streams), line.strip().encode())), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
