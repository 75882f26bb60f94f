"""Messages to bytes and back: MessagePack, decoded strictly into the closed union of one inbox."""

from types import UnionType
from typing import get_args

import msgspec

from tercet.protocol.errors import DecodeError
from tercet.protocol.messages.messages import DecodeSpec, Message

Frame = bytes | bytearray | memoryview

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """One message as a frame. Safe from any thread."""
    return _encoder.encode(message)


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """Frame 0 of everything sent: which start of which peer speaks, and to which start of the receiver.

    The sender encodes it once per peer and the receiver looks it up by its bytes, so it costs nothing per message.
    """

    source: str
    incarnation: str
    target: str = ""
    """The receiver's incarnation; empty only for a first Hello, whose sender cannot know it."""


_envelopes = msgspec.msgpack.Decoder(Envelope)


def encode_envelope(envelope: Envelope) -> bytes:
    """An envelope as a frame."""
    return _encoder.encode(envelope)


def decode_envelope(frame: Frame) -> Envelope:
    """The envelope in a frame. Raises DecodeError."""
    try:
        return _envelopes.decode(frame)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"not an envelope: {error}") from error


_specs = msgspec.msgpack.Decoder(DecodeSpec)


def decode_spec(data: Frame) -> DecodeSpec:
    """What a frontend wrote for the detokenizer, by way of a scheduler that did not open it. Raises DecodeError."""
    try:
        return _specs.decode(data)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"not a decode spec: {error}") from error


class Codec:
    """Encodes any message and decodes those of one union; `tags` names what it decodes, for `Hello.features`."""

    def __init__(self, union: UnionType | type[Message]) -> None:
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(union)
        members = get_args(union) or (union,)
        self.tags: tuple[str, ...] = tuple(sorted(tag_of(member) for member in members))

    encode = staticmethod(encode)

    def decode(self, frame: Frame) -> Message:
        """The message in a frame. Raises DecodeError for garbage, an unknown tag, or values of the wrong type.

        Packed buffers inside are not looked at: `unpack_ints` refuses a torn one when it is read.
        """
        try:
            return self._decoder.decode(frame)
        except (ValueError, RecursionError) as error:
            raise DecodeError(str(error)) from error


def tag_of(kind: type[Message]) -> str:
    """The tag a message type carries on the wire."""
    return str(kind.__struct_config__.tag)
