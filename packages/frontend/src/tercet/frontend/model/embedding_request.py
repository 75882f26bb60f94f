"""What the endpoints that want vectors or scores turn their JSON into: inputs, each of which becomes one vector."""

from typing import NamedTuple

import msgspec


class TextInput(msgspec.Struct, frozen=True):
    """One text. Special tokens written in it stay text; the model's own are put around it."""

    text: str
    most: int | None = None
    """Tokens past which it is cut, as it is where no more fit; None cuts nothing."""


class TokenInput(msgspec.Struct, frozen=True):
    """An input that the client tokenized, special tokens and all."""

    token_ids: list[int]


class PairInput(msgspec.Struct, frozen=True):
    """Two texts that a model reads together, as cross-encoders do."""

    first: str
    second: str
    first_param: str
    """What the client called the first of them."""
    most: int | None = None
    """Tokens past which the second is cut, as it is where no more fit beside the first; None cuts nothing."""


Input = TextInput | TokenInput | PairInput


def size_of(given: Input) -> int:
    """Return about how many characters have to be worked on until an input is token ids."""
    match given:
        case TextInput(text):
            return len(text)
        case TokenInput(ids):
            return len(ids) // 8  # each is only compared
        case PairInput(_, second):  # the first text is tokenized once, however many pairs have it
            return len(second)


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of one HTTP request."""

    model: str
    inputs: list[Input]
    params: list[str]
    """What the client called each input, for error messages; of a pair the second text."""
    prompt_name: str | None = None
    """A prompt of the model's own to put before each text; None takes the model's default, if it has one."""
    truncate: int | None = None
    """Tokens past which an input is cut; -1 is what the model can read, None cuts nothing."""
    priority: int = 0
    tenant: str = ""
    """Whose it is, by `ApiKeyQuota.tenant`."""


class EncodedInput(NamedTuple):
    """An input as a scheduler gets it: int32 buffers. No types means all 0."""

    ids: bytes
    types: bytes = b""
