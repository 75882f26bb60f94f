"""Prompts before tokenization: messages, text or token ids."""

from typing import Any

import msgspec

from tercet.frontend.model.tokenizer_pool import characters_in


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Messages and tools for the model's chat template. Their text never becomes special tokens.

    A message's tool calls have their arguments as objects.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    kwargs: dict[str, Any] = {}
    """Allow-listed variables of the template."""
    param: str = "messages"
    """What the client called it, for error messages; in the other prompts, too."""


class TextPrompt(msgspec.Struct, frozen=True):
    """Text in the model's own notation: special tokens written in it are special tokens."""

    text: str
    add_special_tokens: bool = True
    param: str = "prompt"


class TokenPrompt(msgspec.Struct, frozen=True):
    """A prompt that the client tokenized."""

    token_ids: list[int]
    param: str = "prompt"


Prompt = ChatPrompt | TextPrompt | TokenPrompt


def size_of(prompt: Prompt) -> int:
    """Return about how many characters have to be worked on until a prompt is token ids."""
    match prompt:
        case ChatPrompt():
            return characters_in([prompt.messages, prompt.tools, prompt.kwargs])
        case TextPrompt():
            return len(prompt.text)
        case TokenPrompt():
            return len(prompt.token_ids) // 8  # each is only compared
