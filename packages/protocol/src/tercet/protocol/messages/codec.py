"""Codec of messages: MessagePack, decoded strictly into the closed union of one inbox."""

from types import UnionType
from typing import get_args

import msgspec

from tercet.protocol.errors import DecodeError
from tercet.protocol.messages.messages import DecodeSpec, Message

Frame = bytes | bytearray | memoryview

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """Return a message as a frame. Thread-safe."""
    return _encoder.encode(message)


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """Frame 0 of every message: the incarnations of sender and receiver.

    The sender encodes it once per peer, and the receiver looks it up by its bytes, so there is no cost per message.
    """

    source: str
    incarnation: str
    target: str = ""
    """The receiver's incarnation; empty only for a first Hello, whose sender cannot know it."""


_envelopes = msgspec.msgpack.Decoder(Envelope)


def encode_envelope(envelope: Envelope) -> bytes:
    return _encoder.encode(envelope)


def decode_envelope(frame: Frame) -> Envelope:
    """Return the envelope in a frame. Raises DecodeError."""
    try:
        return _envelopes.decode(frame)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"not an envelope: {error}") from error


_specs = msgspec.msgpack.Decoder(DecodeSpec)


def decode_spec(data: Frame) -> DecodeSpec:
    """Return a frontend's DecodeSpec, which a scheduler forwarded unread. Raises DecodeError."""
    try:
        return _specs.decode(data)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"not a decode spec: {error}") from error


class Codec:
    """Encoder of any message and decoder of one union; `tags` lists the decodable types, for `Hello.features`."""

    def __init__(self, union: UnionType | type[Message]) -> None:
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(union)
        members = get_args(union) or (union,)
        self.tags: tuple[str, ...] = tuple(sorted(tag_of(member) for member in members))

    encode = staticmethod(encode)

    def decode(self, frame: Frame) -> Message:
        """Return the message in a frame. Raises DecodeError for garbage, an unknown tag, or values of the wrong type.

        Packed buffers are not checked: `unpack_ints` refuses a torn one when it is read.
        """
        try:
            return self._decoder.decode(frame)
        except (ValueError, RecursionError) as error:
            raise DecodeError(str(error)) from error


def tag_of(kind: type[Message]) -> str:
    """Return the tag of a message type on the wire."""
    return str(kind.__struct_config__.tag)
