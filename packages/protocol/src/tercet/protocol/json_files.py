"""Strict JSON parser for model files, which processes forward unread: finite numbers and bounded depth only."""

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

MOST_DEPTH = 100
"""Nested containers. Readers recurse over the parsed value."""
_EXACT_DIGITS = 19
"""Digits of integers that stay integers. Longer ones become floats, as in other JSON readers."""
_LONGEST_LINE = 1000
_CONTAINERS = (dict, list)
CONFIG = "config.json"
"""The only file in which a number may be infinite, such as time_step_limit of Mamba 2."""
INFINITY = {"__float__": "Infinity"}
"""Infinity as transformers 5 writes it in a config.json; earlier ones write the word alone."""


def parse_json(content: bytes | str, *, infinity: bool = False) -> Any:
    """Return the value of a JSON document. Raises ValueError, in one line, for a document that is not strict JSON.

    Refused are NaN, Infinity and numbers that no float holds, with the path of the first; text that is not UTF-8; lone
    surrogates; and more than `MOST_DEPTH` nested containers. With `infinity`, Infinity is read as `INFINITY`.
    """
    text = content if isinstance(content, str) else content.decode("utf-8")
    odd = False

    def number(digits: str) -> float:
        nonlocal odd
        value = float(digits)
        odd |= not math.isfinite(value)
        return value

    try:
        value = json.loads(
            text,
            parse_int=lambda digits: int(digits) if len(digits) <= _EXACT_DIGITS else number(digits),
            parse_float=number,
            parse_constant=lambda word: {**INFINITY} if infinity and word == "Infinity" else number(word),
        )
    except RecursionError:
        _refuse_depth()
    _check_depth(value)
    if odd:
        raise ValueError(f"{_path_of_odd(value) or 'a value that another replaces'} is not a finite number")
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("a text has half a surrogate pair, which is no character") from None
    return value


def error_line(error: BaseException, longest: int = _LONGEST_LINE) -> str:
    """Return the message of an error as `one_line`, or its type where it has none."""
    return one_line(str(error), longest) or type(error).__name__


def one_line(text: str, longest: int = _LONGEST_LINE) -> str:
    """Return a text as one line that any log and any message can hold, cut off after `longest` characters."""
    words = " ".join(text[: 2 * longest].split())[:longest]
    if words.isprintable():
        return words
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in words)[:longest]


def _check_depth(value: Any) -> None:
    level = [value] if isinstance(value, _CONTAINERS) else []
    for _ in range(MOST_DEPTH):
        if not level:
            return
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, _CONTAINERS)
        ]
    if level:
        _refuse_depth()


def _refuse_depth() -> NoReturn:
    raise ValueError(f"more than {MOST_DEPTH} lists and objects are inside one another")


def _path_of_odd(value: Any) -> str:
    """Return the path of the first number that is not finite, as in "rope_scaling.factor"; empty without one."""
    if isinstance(value, float) and not math.isfinite(value):
        return "the value"
    if not isinstance(value, _CONTAINERS):
        return ""
    for name, child in value.items() if isinstance(value, dict) else enumerate(value):
        if found := _path_of_odd(child):
            return str(name)[:100] if found == "the value" else f"{str(name)[:100]}.{found}"
    return ""


def read_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Return the JSON object in a file; empty without the file. Raises ValueError with the file's name."""
    try:
        value = parse_json(files.get(name, b"{}"), infinity=name == CONFIG)
    except ValueError as error:
        raise ValueError(f"{name} cannot be read as JSON: {error_line(error)}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} holds no JSON object")
    return value
