"""Prompts before tokenization: messages, text or token ids."""

from collections.abc import Sequence
from typing import Any

import msgspec

from tercet.frontend.media.prompt_media import Source
from tercet.frontend.model.tokenizer_pool import characters_in


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Messages and tools for the model's chat template. Their text never becomes special tokens.

    Arguments of tool calls are objects.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    kwargs: dict[str, Any] = {}
    """Variables that the template reads."""
    param: str = "messages"
    """Client's parameter name for error messages."""
    images: Sequence[Source] = ()
    """Images, clips or sounds of the messages, in order: their parts are `message_form.IMAGE`, `VIDEO` or `SOUND`."""


class TextPrompt(msgspec.Struct, frozen=True):
    """Text in the model's notation: special tokens in it are parsed."""

    text: str
    add_special_tokens: bool = True
    param: str = "prompt"
    images: Sequence[Source] = ()
    """Images and clips in the places of the text that the markers of the model's formats name."""


class TokenPrompt(msgspec.Struct, frozen=True):
    """Token ids from the client."""

    token_ids: list[int]
    param: str = "prompt"


Prompt = ChatPrompt | TextPrompt | TokenPrompt


def size_of(prompt: Prompt) -> int:
    """Estimate the tokenization work of a prompt, in characters."""
    match prompt:
        case ChatPrompt():
            return characters_in([prompt.messages, prompt.tools, prompt.kwargs])
        case TextPrompt():
            return len(prompt.text)
        case TokenPrompt():
            return len(prompt.token_ids) // 8  # ids are only range-checked
