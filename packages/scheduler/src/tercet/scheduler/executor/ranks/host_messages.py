"""Messages between the host of rank 0 and the other hosts of a model.

Every message names the session of the other host: a random text that it makes for each attempt to join, so that no
message of an earlier attempt counts. Host 0 sends `Model`, `Begin`, then `Forward` with an order of `rank_messages`
as the second frame; the other host sends `Join`, `Fits`, `Listening`. Both send `Alive` all the time.
"""

import msgspec

from tercet.protocol.errors import DecodeError
from tercet.protocol.messages.codec import Frame


class _Message(msgspec.Struct, frozen=True, kw_only=True):
    session: str


class Join(_Message, frozen=True, kw_only=True, tag="join"):
    """A request of a host to run its ranks; repeated until host 0 sends `Begin`, so that no lost answer matters."""

    host: int
    address: str
    """Address of the host's inbox."""
    software: str
    """Versions that must be equal on all hosts."""


class Fits(_Message, frozen=True, tag="fits"):
    """An answer to `Model`: the host has the same weights, and can run its ranks."""


class Unfit(_Message, frozen=True, kw_only=True, tag="unfit"):
    """An answer to `Model`: the host leaves."""

    reason: str


class Listening(_Message, frozen=True, tag="listening"):
    """A report that all ranks of the host take orders."""


class Ended(_Message, frozen=True, kw_only=True, tag="ended"):
    """A report that a rank of the host died or hangs. The host leaves."""

    rank: int
    reason: str


class Alive(_Message, frozen=True, kw_only=True, tag="alive"):
    """A heartbeat, sent by a thread that computes nothing."""

    loading: bool


class Model(_Message, frozen=True, kw_only=True, tag="model"):
    """Host 0's model, which the other host must have, too."""

    options: bytes
    """`WorkerOptions` of rank 0 in JSON; decoding them needs torch."""
    device: str
    """cuda or cpu."""
    fingerprint: str
    count: int
    """Number of ranks on each host."""
    shards: int
    """Number of ranks of each pipeline stage."""
    stages: int


class Begin(_Message, frozen=True, kw_only=True, tag="begin"):
    """An order to start the host's ranks, once all hosts have joined."""

    store: str
    """HOST:PORT of the store at which all ranks meet."""


class Refused(_Message, frozen=True, kw_only=True, tag="refused"):
    """An answer to `Join`: the host cannot take part."""

    reason: str


class Forward(_Message, frozen=True, tag="forward"):
    """The header of an order for all ranks of the host, which is the next frame."""


ToHost0 = Join | Fits | Unfit | Listening | Ended | Alive
FromHost0 = Model | Begin | Refused | Forward | Alive

_encoder = msgspec.msgpack.Encoder()
_to_host_0: msgspec.msgpack.Decoder[ToHost0] = msgspec.msgpack.Decoder(ToHost0)
_from_host_0: msgspec.msgpack.Decoder[FromHost0] = msgspec.msgpack.Decoder(FromHost0)


def encode(message: ToHost0 | FromHost0) -> bytes:
    """Encode a message as a frame."""
    return _encoder.encode(message)


def decode_to_host_0(frame: Frame) -> ToHost0:
    """Decode a message of another host. Raise DecodeError."""
    try:
        return _to_host_0.decode(frame)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"not a message to host 0: {error}") from error


def decode_from_host_0(frame: Frame) -> FromHost0:
    """Decode a message of host 0. Raise DecodeError."""
    try:
        return _from_host_0.decode(frame)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"not a message of host 0: {error}") from error
