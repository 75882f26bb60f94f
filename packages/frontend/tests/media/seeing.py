"""Tiny model that reads images, and messages with images."""

from collections.abc import Callable
from typing import Any

import msgspec
from tokenizers import Tokenizer

from tercet.frontend.testing import FakeEngine
from tercet.protocol.messages.media import FixedSize, ImageFormat
from tercet.protocol.messages.values import ModelLimits

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|endoftext|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
)


def seeing(
    engine_of: Callable[..., FakeEngine],
    files: dict[str, bytes],
    limits: ModelLimits,
    tokenizer: Tokenizer,
    **changes: Any,
) -> FakeEngine:
    """Return an engine whose model reads images of three tokens, or in the form with these changes."""
    token_id = tokenizer.token_to_id("</s>")
    assert token_id is not None
    form = ImageFormat(
        size=FixedSize(height=2, width=6),
        patch=2,
        resample=2,
        marker="<|endoftext|>",
        prefix="<s>",
        token="</s>",
        suffix="\n",
        token_id=token_id,
        max_tokens=3,
    )
    form = msgspec.structs.replace(form, **changes)
    files = {**files, "chat_template.jinja": TEMPLATE.encode()}
    return engine_of(files=files, limits=msgspec.structs.replace(limits, images=form))


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}
