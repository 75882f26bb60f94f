"""Messages between a frontend and its audio workers."""

import msgspec


class ReadAudio(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Order to read a file: its answer is the first window. All windows together get `seconds` of processor time."""

    base64: str = ""
    """File, unless it is in `file`."""
    file: bytes = b""
    rate: int
    """Samples per second of the windows."""
    window: int
    """Maximum samples of a window."""
    exact: bool = False
    """All windows but the last have so many samples; otherwise a window ends where it is quiet."""
    seconds: float


class ReadWindow(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Order to read the next window of the same file."""


class AudioWindow(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an order: int16 samples, none after the last window, or the fault of the file."""

    samples: bytes = b""
    error: str = ""


decode_order = msgspec.msgpack.Decoder(ReadAudio | ReadWindow).decode
decode_window = msgspec.msgpack.Decoder(AudioWindow).decode
