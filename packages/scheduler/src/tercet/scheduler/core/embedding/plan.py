"""What the embedding core asks of an executor for one step, and what comes back."""

import msgspec


class EncoderCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """What an encoder's model allows."""

    context_length: int
    vocab_size: int
    token_types: int = 1
    """Kinds of segment it tells apart. With one the types that come along mean nothing to it."""
    width: int
    """Numbers it gives for one input."""


class EncodeRow(msgspec.Struct, frozen=True):
    """One whole input: nothing of it is kept between steps. Both are int32 buffers; no types means all 0."""

    input_ids: bytes
    token_types: bytes = b""


class EncodePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step."""

    step: int
    rows: list[EncodeRow]


class EncodeResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one plan gave: little-endian float32 [rows, width]."""

    step: int
    vectors: bytes
    failed: list[int] = []
    """Rows whose numbers were not all finite. Their part of `vectors` is of no meaning."""
    too_large: list[int] = []
    """Rows that there was no memory for, each by itself. The same of theirs."""
