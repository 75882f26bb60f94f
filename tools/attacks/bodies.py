"""Bodies that are slow to read: many keys, many numbers, small chunks, pipelines."""

import json

from tools.attacks.attack import Attack
from tools.attacks.http import again, at_once, head, post, send

_MIB = 1 << 20
_BODY = 32 * _MIB - 4096


def _members() -> bytes:
    """Return an object of distinct keys that is as long as a body may be."""
    thousand = b"".join(b',"k####%03d":1' % each for each in range(1000))
    given = b"".join(thousand.replace(b"####", b"%04d" % each) for each in range(_BODY // len(thousand)))
    return b'{"model":"m","prompt":"a","x":{' + given[1:] + b"}}"


async def members(url: str, key: str) -> None:
    body = _members()
    await at_once(post(url, key, "/v1/completions", body) for _ in range(8))


async def allowed_members(url: str, key: str) -> None:
    """Send the largest number of keys that is parsed."""
    given = b",".join(b'"k%07d":1' % each for each in range(65_000))
    body = b'{"model":"m","prompt":"a","x":{' + given + b"}}"
    await at_once(again(lambda: post(url, key, "/v1/completions", body)) for _ in range(8))


async def numbers(url: str, key: str) -> None:
    body = json.dumps({"model": "m", "prompt": [5] * 4_000_000}).encode()
    await at_once(again(lambda: post(url, key, "/v1/completions", body)) for _ in range(4))


async def allowed_numbers(url: str, key: str) -> None:
    body = json.dumps({"model": "m", "prompt": [5] * 520_000}).encode()
    await at_once(again(lambda: post(url, key, "/v1/completions", body)) for _ in range(4))


async def messages(url: str, key: str) -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "a"}] * 8192}).encode()
    await at_once(again(lambda: post(url, key, "/v1/chat/completions", body)) for _ in range(4))


async def quoted(url: str, key: str) -> None:
    """Send one string that looks as if it had many values."""
    body = b'{"model":"m","prompt":"' + b'\\"a\\":1,' * (_BODY // 8) + b'"}'
    await at_once(again(lambda: post(url, key, "/v1/completions", body)) for _ in range(4))


async def small_chunks(url: str, key: str) -> None:
    begin = head(url, key, "POST", "/v1/completions", "Transfer-Encoding: chunked")
    pieces = [b"1\r\na\r\n" * 10_000] * 100
    await at_once(again(lambda: send(url, begin, *pieces)) for _ in range(8))


async def pipelines(url: str, key: str) -> None:
    ask = head(url, key, "GET", "/live").replace(b"Connection: close", b"X: y")
    await at_once(again(lambda: send(url, ask * 5000)) for _ in range(8))


ATTACKS = (
    Attack("8 bodies of 32 MiB, millions of keys", members),
    Attack("bodies of 65,000 keys, 8 at a time", allowed_members),
    Attack("bodies of 4,000,000 numbers, 4 at a time", numbers),
    Attack("bodies of 520,000 numbers, 4 at a time", allowed_numbers),
    Attack("chats of 8,192 messages, 4 at a time", messages),
    Attack("texts of 32 MiB full of quoted JSON, 4 at a time", quoted),
    Attack("bodies in chunks of one byte, 8 at a time", small_chunks),
    Attack("5,000 pipelined requests, 8 at a time", pipelines),
)
