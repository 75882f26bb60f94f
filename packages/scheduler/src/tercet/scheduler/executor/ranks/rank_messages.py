"""Messages from rank 0 to the other ranks: steps, and tokens that grammars have forced."""

import msgspec

from tercet.protocol.errors import DecodeError
from tercet.protocol.messages.codec import Frame
from tercet.scheduler.core.plan import Plan


class Forced(msgspec.Struct, frozen=True):
    """Tokens (int32 buffer) appended to a slot from position `first` on, because its grammar allowed no others."""

    slot: int
    first: int
    tokens: bytes


class RankStep(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """An order to append the tokens forced since the last step, then run a plan."""

    plan: Plan
    forced: list[Forced] = []
    sampled: list[Forced] = []
    """Tokens that rank 0 has sampled since the last step, for ranks of other pipeline stages."""


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """An order to do what `Executor.prepare` does."""


Order = RankStep | Prepare
"""Any order. Ranks execute orders in the order in which they were sent."""


def without_sampling(plan: Plan) -> Plan:
    """Return a plan for a rank without a head: it computes the same tokens, and samples and scores none."""
    replace = msgspec.structs.replace
    rows = [replace(row, sample=False) if row.sample else row for row in plan.rows]
    introduce = [replace(init, prompt_logprobs=False) if init.prompt_logprobs else init for init in plan.introduce]
    return replace(plan, rows=rows, introduce=introduce)


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)


def encode_order(order: Order) -> bytes:
    """Encode an order as a frame."""
    return _encoder.encode(order)


def decode_order(frame: Frame) -> Order:
    """Decode an order from a frame. Raise DecodeError."""
    try:
        return _decoder.decode(frame)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"not an order of rank 0: {error}") from error
