"""What rank 0 tells the other processes of its model: which steps it runs, and what it gave slots besides."""

import msgspec

from tercet.protocol.errors import DecodeError
from tercet.protocol.messages.codec import Frame
from tercet.scheduler.core.plan import Plan


class Forced(msgspec.Struct, frozen=True):
    """Tokens (int32 buffer) that a slot was given from position `first` on, for its grammar allowed no others."""

    slot: int
    first: int
    tokens: bytes


class RankStep(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """Give slots what was forced since the last step, then run a plan."""

    plan: Plan
    forced: list[Forced] = []


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """Do what `Executor.prepare` does."""


Order = RankStep | Prepare
"""Everything that is sent. Orders are followed one after another, in the order in which they were given."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)


def encode_order(order: Order) -> bytes:
    """An order as a frame."""
    return _encoder.encode(order)


def decode_order(frame: Frame) -> Order:
    """The order in a frame. Raises DecodeError."""
    try:
        return _decoder.decode(frame)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"not an order of rank 0: {error}") from error
