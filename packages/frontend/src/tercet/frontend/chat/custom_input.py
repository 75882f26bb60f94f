"""The input of a custom tool's call out of arguments in JSON, as they arrive in pieces."""

import json
import re
from collections.abc import Callable

_HEAD = '{"input":"'
_SPACED = frozenset({0, 1, 8, 9})
"""Characters of it that may have white space before them."""
_SPACE = " \t\r\n"
_RUN = re.compile(r'[^"\\]+')
_HIGH, _LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPE = re.compile(rf"{_HIGH}{_LOW}|\\u[0-9a-fA-F]{{4}}|\\[^u]|\\u", re.DOTALL)
_CUT = re.compile(rf"\\(?:u[0-9a-fA-F]{{0,3}})?\Z|{_HIGH}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?\Z")
"""What more text may make another escape of."""
_UNKNOWN = "\ufffd"


class InputDecoder:
    """Reads one call's arguments: the string `input` of an object is told decoded, while it grows.

    Anything else is told as it is written: at once where it is no object, otherwise at its end. What an object has
    besides `input` is left out, and an empty one is no input. Never raises for anything a model writes: an escape that
    JSON has not stands for itself, half of a surrogate pair is U+FFFD, and an escape that the end cuts off is nothing.
    """

    def __init__(self) -> None:
        self._place = 0
        """How much of the head has been read."""
        self._held: list[str] = []
        """All that was read, until it is known what it is."""
        self._cut = ""
        """The beginning of an escape."""
        self._read: Callable[[str], str] = self._head

    def feed(self, text: str) -> str:
        """What is certain of the input with this text."""
        return self._read(text)

    def finish(self, *, complete: bool) -> str:
        """What was held back, once, when no more text comes.

        Unless the call is `complete`, what may have begun an object with an input is none yet.
        """
        if not complete and self._read == self._head:
            return ""
        written = "".join(self._held)
        try:
            value = json.loads(written, strict=False)
        except (ValueError, RecursionError):
            return written
        if isinstance(value, dict) and isinstance(text := value.get("input"), str):
            return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return "" if value == {} else written

    # What the next text is, each a value of `_read`.

    def _head(self, text: str) -> str:
        for at, char in enumerate(text):
            if self._place in _SPACED and char in _SPACE:
                continue
            if char != _HEAD[self._place]:
                return self._other(text)
            self._place += 1
            if self._place == len(_HEAD):
                self._held.clear()
                self._read = self._string
                return self._string(text[at + 1 :])
        self._held.append(text)
        return ""

    def _other(self, text: str) -> str:
        self._held.append(text)
        if self._place:
            self._read = self._object
            return ""
        self._read = self._as_it_is
        begun = "".join(self._held)
        self._held.clear()
        return begun

    def _object(self, text: str) -> str:
        self._held.append(text)
        return ""

    def _as_it_is(self, text: str) -> str:
        return text

    def _string(self, text: str) -> str:
        text, self._cut = self._cut + text, ""
        parts: list[str] = []
        at = 0
        while at < len(text):
            if run := _RUN.match(text, at):
                parts.append(run[0])
                at = run.end()
            elif text[at] == '"':
                self._read = self._behind
                break
            elif cut := _CUT.match(text, at):
                self._cut = cut[0]
                break
            else:
                escape = _ESCAPE.match(text, at)
                assert escape is not None
                parts.append(_decoded(escape[0]))
                at = escape.end()
        return "".join(parts)

    def _behind(self, _text: str) -> str:
        return ""


def _decoded(escape: str) -> str:
    """What an escape stands for."""
    try:
        value = str(json.loads(f'"{escape}"', strict=False))
    except ValueError:
        return escape
    return _UNKNOWN if "\ud800" <= value <= "\udfff" and len(value) == 1 else value
