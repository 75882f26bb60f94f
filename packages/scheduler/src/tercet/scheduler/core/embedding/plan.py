"""Plan of one encoder step, and its result."""

import msgspec


class EncoderCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of an encoder's model."""

    context_length: int
    vocab_size: int
    token_types: int = 1
    """Number of segment types. With one type, the types of inputs are ignored."""
    width: int
    """Numbers in the output of one input."""


class EncodeRow(msgspec.Struct, frozen=True):
    """A whole input: no state is kept between steps. Both are int32 buffers; no types means all 0."""

    input_ids: bytes
    token_types: bytes = b""


class EncodePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Plan of one step."""

    step: int
    rows: list[EncodeRow]


class EncodeResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one plan. `vectors` is little-endian float32 [rows, width]."""

    step: int
    vectors: bytes
    failed: list[int] = []
    """Rows with non-finite numbers. Their part of `vectors` has no meaning."""
    too_large: list[int] = []
    """Rows that did not fit into memory, each by itself. Their part of `vectors` has no meaning, either."""
