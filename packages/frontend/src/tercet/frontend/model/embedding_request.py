"""Requests for embeddings, scores and classifications, independent of the endpoint."""

from typing import NamedTuple

import msgspec


class TextInput(msgspec.Struct, frozen=True):
    """Text input. Special tokens in it are plain text; the model's own are added around it."""

    text: str
    most: int | None = None
    """Maximum tokens before it is cut, at most as many as fit; None disables cutting."""


class TokenInput(msgspec.Struct, frozen=True):
    """Token ids from the client, including special tokens."""

    token_ids: list[int]


class PairInput(msgspec.Struct, frozen=True):
    """Two texts that a model reads together, for cross-encoders."""

    first: str
    second: str
    first_param: str
    """Client's parameter name of the first text."""
    most: int | None = None
    """Maximum tokens before the second text is cut, at most as many as fit beside the first; None disables cutting."""


Input = TextInput | TokenInput | PairInput


def size_of(given: Input) -> int:
    """Estimate the tokenization work of an input, in characters."""
    match given:
        case TextInput(text):
            return len(text)
        case TokenInput(ids):
            return len(ids) // 8  # ids are only range-checked
        case PairInput(_, second):  # the first text is tokenized once for all pairs
            return len(second)


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of one HTTP request."""

    model: str
    inputs: list[Input]
    params: list[str]
    """Client's parameter name of each input, for error messages; of a pair, that of the second text."""
    prompt_name: str | None = None
    """Name of a prompt of the model to put before each text; None selects the model's default, if any."""
    truncate: int | None = None
    """Maximum tokens before an input is cut; -1 selects the model's context, None disables cutting."""
    priority: int = 0
    tenant: str = ""
    """Tenant id from `ApiKeyQuota.tenant`."""


class EncodedInput(NamedTuple):
    """Input for a scheduler, as int32 buffers. Empty types mean all 0."""

    ids: bytes
    types: bytes = b""
