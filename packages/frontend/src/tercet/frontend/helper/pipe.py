"""Messages between a frontend and its helpers: msgpack after four bytes of length, over pipes."""

from typing import Any, BinaryIO

import msgspec

LENGTH = 4
_encode = msgspec.msgpack.Encoder().encode


def encode_frame(message: Any) -> bytes:
    """Return a message with its length before it."""
    data = _encode(message)
    return len(data).to_bytes(LENGTH, "little") + data


def read_frame(source: BinaryIO) -> bytes | None:
    """Return the next message, still encoded, or None at the end."""
    head = source.read(LENGTH)
    if len(head) < LENGTH:
        return None
    data = source.read(size := int.from_bytes(head, "little"))
    return data if len(data) == size else None
