"""Calls as a model writes them, for histories and instructions in prompts."""

import json
from collections.abc import Iterable, Mapping

from tercet.frontend.parsers.port import Style, ToolFraming

_WORDS = {True: "True", False: "False", None: "None"}


def write_calls(framing: ToolFraming, calls: Iterable[tuple[str, Mapping[str, object]]]) -> str:
    """Return an answer that has these calls: names and arguments."""
    written = [
        framing.prefix_of(name, index) + _arguments(framing, arguments) + framing.suffix
        for index, (name, arguments) in enumerate(calls)
    ]
    return framing.begin + framing.separator.join(written) + framing.end


def example_call(framing: ToolFraming, name: str) -> str:
    """Return an answer with one call, which shows where its arguments stand."""
    if framing.style is Style.JSON:
        return f"{framing.begin}{framing.prefix_of(name)}{{...}}{framing.suffix}{framing.end}"
    return write_calls(framing, [(name, {"argument": "value"})])


def _arguments(framing: ToolFraming, arguments: Mapping[str, object]) -> str:
    if framing.style is Style.JSON:
        return _json(arguments)
    return framing.key_separator.join(
        framing.key_prefix_of(key) + _value(framing, value) + framing.key_suffix for key, value in arguments.items()
    )


def _value(framing: ToolFraming, value: object) -> str:
    if framing.style is Style.PYTHON:
        return _literal(value)
    if isinstance(value, str):
        return framing.string_begin + value + framing.string_end
    return framing.other_begin + _json(value)


def _literal(value: object) -> str:
    """Return a JSON value as a Python literal. A string in JSON is one, too."""
    match value:
        case None | bool():
            return _WORDS[value]
        case dict():
            return "{" + ", ".join(f"{_json(key)}: {_literal(each)}" for key, each in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(_literal, value)) + "]"
    return _json(value)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
