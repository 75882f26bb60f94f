"""Seeded damage to the files of models, for tests of their readers."""

import faulthandler
import json
import resource
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

ROOM = 4 << 30
"""Bytes of address space that a case may use beyond those of a process that has not begun."""
LONGEST = 60.0
"""Seconds for one case."""

_RAW = "\ufdd0raw"
_RAW_TOKENS = ("NaN", "-Infinity", "1e999", "1" * 401, "[" * 500 + "]" * 500, "[" * 50_000, "1e-400", '"\\ud800"')
"""JSON tokens that `json.dumps` never writes."""
_PLAIN: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30),
    *(0.0, 0.5, -0.5, 1.5, 1e-320, 1e-10, 1e15, 1e308, -1e308),
    *("", "x", "0", "NaN", "x" * 100_000, "\0", "../../../etc/passwd", "/dev/zero", "a\nb", "ü🙂", "(a+)+$", "{{ x }}"),
    *([], {}, [[]], [{}], {"a": 1}, {"": None}, [0], [-1, 2.5], ["x"], list(range(2000)), [None] * 3),
)


def run_cases(case: Callable[[Random], str], *, first: int, count: int, seconds: float) -> int:
    """Run a reader on the seeds from `first` on, `count` of them or as many as `seconds` allow, in bounded memory.

    `case` returns why the damaged file is refused, or "" where it was read. Returns 1 after the first case that raises,
    or whose refusal is not one line of printable text, and 0 otherwise: an exit status. A case that takes too long ends
    the process. The last line on stderr names the seed.
    """
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    room = pages * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    end, tried, refused = time.monotonic() + seconds, 0, 0
    while tried < count and time.monotonic() < end:
        sys.stderr.write(f"seed {first + tried}\n")
        faulthandler.dump_traceback_later(LONGEST, exit=True)
        try:
            refusal = case(Random(first + tried))  # noqa: S311
            assert refusal.isprintable(), f"no line: {refusal!r}"
        except BaseException:
            traceback.print_exc()
            sys.stderr.write(f"seed {first + tried}\n")
            return 1
        finally:
            faulthandler.cancel_dump_traceback_later()
        tried += 1
        refused += bool(refusal)
    sys.stdout.write(f"{tried} cases, {refused} refused\n")
    return 0


def damaged_json(content: bytes, random: Random) -> bytes:
    """Return a JSON document with one to three values replaced, dropped, moved, renamed or doubled; or `damaged`."""
    if random.random() < 0.15:
        return damaged(content, random)
    tree = json.loads(content)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        places = _places(tree)
        if not places:
            break
        node, key = random.choice(places)
        _change(node, key, places, random)
    text = json.dumps(tree)
    for number, token in enumerate(_RAW_TOKENS):
        text = text.replace(json.dumps(f"{_RAW}{number}"), token)
    if random.random() < 0.05 and text.startswith("{") and len(text) > 2:
        text = "{" + text[1:-1] + "," + text[1:]
    return text.encode()


def damaged(content: bytes, random: Random) -> bytes:
    """Return bytes of which some are flipped, cut off, repeated, inserted, or all of which are others."""
    if not content:
        return random.randbytes(random.randrange(64))
    start = random.randrange(len(content))
    end = min(len(content), start + random.choice((1, 2, 8, 100, 5000)))
    match random.randrange(7):
        case 0:
            return content[:start]
        case 1:
            return content[:start] + content[end:]
        case 2:
            return content[:end] + content[start:]
        case 3:
            return content[:start] + random.randbytes(end - start) + content[end:]
        case 4:
            return (
                content[:start]
                + random.choice((b"\0", b"\xff", b"{", b"]", b'"', b"\\", b"-", b"9" * 30))
                + content[start:]
            )
        case 5:
            flipped = bytes([content[start] ^ (1 << random.randrange(8))])
            return content[:start] + flipped + content[start + 1 :]
        case _:
            return random.choice((b"", b"{}", b"[]", b"null", b"\xef\xbb\xbf" + content, random.randbytes(100)))


def damaged_safetensors(content: bytes, random: Random) -> bytes:
    """Return a safetensors file whose header, its length or whose bytes are damaged."""
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    kind = random.randrange(10)
    if kind == 0:
        return (
            random.choice((0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1)).to_bytes(8, "little") + content[8:]
        )
    if kind == 1:
        return damaged(content, random)
    if kind == 2:
        tree = json.loads(header)
        tree["__metadata__"] = random.choice((*_PLAIN, {"format": 5}, {"format": None}, {"a": {}}))
        header = json.dumps(tree).encode()
    else:
        header = damaged_json(header, random)
    return len(header).to_bytes(8, "little") + header + data


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of each value; of a long list or object only the first 200."""
    found, level = [], [tree]
    while level:
        node = level.pop()
        keys = list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []
        for key in keys[:200]:
            found.append((node, key))
            level.append(node[key])
    return found


def _change(node: Any, key: Any, places: list[tuple[Any, Any]], random: Random) -> None:
    """Replace, drop, move, rename or wrap one value."""
    match random.choice(("replace", "replace", "replace", "drop", "move", "rename", "wrap")):
        case "replace":
            raw = f"{_RAW}{random.randrange(len(_RAW_TOKENS))}"
            node[key] = raw if random.random() < 0.2 else json.loads(json.dumps(random.choice(_PLAIN)))
        case "drop":
            del node[key]
        case "move":
            other, where = random.choice(places)
            node[key] = json.loads(json.dumps(other[where]))
        case "rename" if isinstance(node, dict):
            node[random.choice(("", "x", f"{key}_", "__metadata__", "type", "a" * 5000, "\n"))] = node.pop(key)
        case _:
            node[key] = random.choice(([node[key]], {"type": node[key]}, str(node[key])))
