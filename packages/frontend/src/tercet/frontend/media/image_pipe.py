"""Messages between a frontend and its image workers."""

import msgspec

from tercet.protocol.messages.media import ImageSize


class Decode(msgspec.Struct, frozen=True, kw_only=True):
    """Order to decode a file and to resize its image, within `seconds` of processor time."""

    base64: str = ""
    """File, unless it is in `file`."""
    file: bytes = b""
    size: ImageSize
    patch: int
    resample: int
    seconds: float


class Decoded(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an order: the array, uint8 [height, width, 3], or the fault of the file."""

    array: bytes = b""
    height: int = 0
    width: int = 0
    grid: tuple[int, int] = (0, 0)
    """Rows and columns of tiles of an image that is cut into several."""
    original: tuple[int, ...] = ()
    """See `ImageInput.original`."""
    error: str = ""


decode_order = msgspec.msgpack.Decoder(Decode).decode
decode_result = msgspec.msgpack.Decoder(Decoded).decode
