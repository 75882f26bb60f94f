"""Attacks with images. A server whose model reads none refuses them."""

import base64
import io
import itertools
import json
import os

from tools.attacks.attack import Attack
from tools.attacks.http import again, at_once, model_of, post

_SIDE = 1344


def _png(number: int) -> str:
    """Return an image that differs from others in its color."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (_SIDE, _SIDE), (number % 256, number // 256 % 256, os.getpid() % 256)).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


async def images(url: str, key: str, count: int = 1) -> None:
    """Ask about images that no other request has, four requests at a time."""
    model, numbers = await model_of(url, key), itertools.count()

    async def ask() -> None:
        parts = [{"type": "image_url", "image_url": {"url": _png(next(numbers))}} for _ in range(count)]
        content = [{"type": "text", "text": "hi"}, *parts]
        body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 1}
        await post(url, key, "/v1/chat/completions", json.dumps(body).encode())

    await at_once(again(ask) for _ in range(4))


ATTACKS = (
    Attack("images, each new, 4 at a time", images),
    Attack("chats of 8 images, each new, 4 at a time", lambda url, key: images(url, key, 8)),
)
