"""Prompts of models with an encoder and a decoder of text. Since 1.1."""

import msgspec


class EncoderInput(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts of a model whose encoder reads them, and whose decoder writes the answer."""

    tokens: int
    """Maximum tokens of a prompt. The context length is the decoder's, which the answer alone takes."""
    start: list[int]
    """Tokens that the decoder starts from."""
