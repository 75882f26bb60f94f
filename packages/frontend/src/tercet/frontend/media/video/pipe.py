"""Messages between a frontend and its video workers."""

import msgspec

from tercet.protocol.messages.video import VideoFormat


class ReadVideo(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Order to read a clip: its answer is the first group of frames. All groups get `seconds` of processor time."""

    base64: str = ""
    """File, unless it is in `file`; with `stills`, files of images, with commas between them."""
    file: bytes = b""
    stills: bool = False
    form: VideoFormat
    seconds: float


class ReadGroup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Order to read the next group of the same clip."""


class FrameGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an order: uint8 [frames, height, width, 3], no array after the last group, or the fault of the file."""

    array: bytes = b""
    height: int = 0
    width: int = 0
    seconds: float = 0.0
    """Mean time of its first and last frame."""
    time: int = 0
    """Position relative to the first group: see `ImageInput`."""
    error: str = ""


decode_order = msgspec.msgpack.Decoder(ReadVideo | ReadGroup).decode
decode_group = msgspec.msgpack.Decoder(FrameGroup).decode
