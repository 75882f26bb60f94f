"""Attacks on the store of responses: endless followers, long conversations, many writes, a held lock."""

import contextlib
import re
import sqlite3

from tercet.protocol.system.private_files import state_directory
from tools.attacks.attack import Attack
from tools.attacks.http import again, at_once, head, model_of, post, send


async def _made(url: str, key: str, tokens: int) -> str:
    """Create a response in the background, and return its id."""
    body = {"model": await model_of(url, key), "input": "Once upon a time", "background": True}
    answer = await post(url, key, "/v1/responses", {**body, "max_output_tokens": tokens})
    found = re.search(rb'"id":"(resp_[^"]+)"', answer)
    if found is None:
        raise RuntimeError(f"no response was made: {answer[:300]!r}")
    return found[1].decode()


async def followers(url: str, key: str) -> None:
    response = await _made(url, key, 500)
    ask = head(url, key, "GET", f"/v1/responses/{response}?stream=true")
    await at_once(again(lambda: send(url, ask)) for _ in range(1000))


async def conversations(url: str, key: str) -> None:
    """Write and read thirty megabytes of items."""
    item = {"type": "message", "role": "user", "content": "a" * 1_400_000}
    answer = await post(url, key, "/v1/conversations", {"items": [item] * 20})
    found = re.search(rb'"id":"(conv_[^"]+)"', answer)
    if found is None:
        raise RuntimeError(f"no conversation was made: {answer[:300]!r}")
    ask = head(url, key, "GET", f"/v1/conversations/{found[1].decode()}/items?limit=100")
    await at_once(again(lambda: send(url, ask)) for _ in range(8))


async def writes(url: str, key: str) -> None:
    body = {"items": [{"type": "message", "role": "user", "content": "a"}] * 20}
    await at_once(again(lambda: post(url, key, "/v1/conversations", body)) for _ in range(32))


async def held_lock(url: str, key: str) -> None:
    """Write conversations while another process holds the lock of the database."""
    [file] = state_directory().glob("*.sqlite")
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        await writes(url, key)


ATTACKS = (
    Attack("1,000 followers of one background response", followers),
    Attack("a conversation of 28 MB, read 8 times at once", conversations),
    Attack("conversations written, 32 at a time", writes),
    Attack("the same while a process holds the database's lock", held_lock),
)
