"""Attacks by prompts: they try to fill the tokenizer's threads, a scheduler's queue or the memory for bodies."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import httpx2
import orjson

from tools.attacks.attack import SECONDS, Attack

_WORDS = "The scheduler fills one token budget a step, and tenants take turns by what they were given. "


def _text(number: int, length: int) -> str:
    """Return a text of `length` characters; a different `number` gives a text without a common prefix."""
    head = f"{number} "
    return (head + _WORDS * (length // len(_WORDS) + 1))[:length]


def _post(path: str, body: Callable[[str, int], dict[str, Any]], requests: int) -> Callable[[str, str], Any]:
    """Return an attack that posts `requests` bodies at the same time; `body` gets the model's name and a number."""

    async def run(url: str, key: str) -> None:
        limits = httpx2.Limits(max_connections=requests + 1)
        async with httpx2.AsyncClient(base_url=url, timeout=SECONDS, limits=limits) as http:
            headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
            model = (await http.get("/v1/models", headers=headers)).json()["data"][0]["id"]
            bodies = [orjson.dumps(body(model, number)) for number in range(requests)]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SECONDS):
                    posts = (http.post(path, content=content, headers=headers) for content in bodies)
                    await asyncio.gather(*posts, return_exceptions=True)

    return run


def _prompts(texts: Sequence[str], **more: Any) -> Callable[[str, int], dict[str, Any]]:
    return lambda model, number: {"model": model, "prompt": [f"{number} {text}" for text in texts], **more}


def _long_chat(model: str, number: int) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": _text(number, 1 << 20)}], "max_tokens": 1}


def _held(model: str, number: int) -> dict[str, Any]:
    """Return a body of 30 MiB whose request then waits for a schema to be checked."""
    names = {f"property_{number}_{each}": {"type": "string", "maxLength": 900} for each in range(400)}
    schema = {"type": "object", "properties": names, "required": list(names), "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "held", "schema": schema, "strict": True}}
    ids = [1000 + number] * 5_000_000
    return {"model": model, "prompt": [ids[:2_500_000], ids[:2_500_000]], "response_format": form, "max_tokens": 1}


_SHORT = [f"{number} say something" for number in range(2048)]

ATTACKS: tuple[Attack, ...] = (
    Attack(
        "3 requests of 2,048 prompts of 16,000 characters",
        _post("/v1/completions", _prompts([_text(each, 16_000) for each in range(2048)], max_tokens=1), 3),
    ),
    Attack(
        "3 requests of 2,048 short prompts, of 16 tokens of output each",
        _post("/v1/completions", _prompts(_SHORT, max_tokens=16, ignore_eos=True), 3),
    ),
    Attack(
        "16 requests of 128 choices, of 500 tokens of output each",
        _post(
            "/v1/chat/completions",
            lambda model, number: {
                "model": model,
                "messages": [{"role": "user", "content": f"{number}: go on"}],
                "n": 128,
                "max_tokens": 500,
                "ignore_eos": True,
            },
            16,
        ),
    ),
    Attack(
        "64 requests to count the tokens of 1 MiB",
        _post("/tokenize", lambda model, number: {"model": model, "prompt": _text(number, 1 << 20)}, 64),
    ),
    Attack("32 chats of 1 MiB", _post("/v1/chat/completions", _long_chat, 32)),
    Attack("5 bodies of 25 MiB that wait for a schema", _post("/v1/completions", _held, 5)),
)
