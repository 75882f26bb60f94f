"""Streaming decoder of a custom tool's input from JSON arguments."""

import json
import re
from collections.abc import Callable

_HEAD = '{"input":"'
_SPACED = frozenset({0, 1, 8, 9})
"""Positions in `_HEAD` that white space may precede."""
_SPACE = " \t\r\n"
_RUN = re.compile(r'[^"\\]+')
_HIGH, _LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPE = re.compile(rf"{_HIGH}{_LOW}|\\u[0-9a-fA-F]{{4}}|\\[^u]|\\u", re.DOTALL)
_CUT = re.compile(rf"\\(?:u[0-9a-fA-F]{{0,3}})?\Z|{_HIGH}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?\Z")
"""Incomplete escape at the end of a piece, which more text may complete."""
_UNKNOWN = "\ufffd"


class InputDecoder:
    """Decoder of one call's arguments that streams the string `input` of a JSON object.

    Other JSON is passed on as written: at once if it is not an object, otherwise at its end. Keys besides `input` are
    dropped, and an empty object is an empty input. Model output never raises: an invalid escape is kept as it is, half
    of a surrogate pair becomes U+FFFD, and an escape that is cut off at the end is dropped.
    """

    def __init__(self) -> None:
        self._position = 0
        """Number of characters of `_HEAD` that have been read."""
        self._held: list[str] = []
        """Text read before the kind of the arguments is known."""
        self._cut = ""
        """Incomplete escape."""
        self._read: Callable[[str], str] = self._head

    def feed(self, text: str) -> str:
        """Return the input that is certain after this text."""
        return self._read(text)

    def finish(self, *, complete: bool) -> str:
        """Return the text held back, once, after the last piece.

        In an incomplete call, the beginning of an object yields no input.
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

    # States of the decoder, each a value of `_read`.

    def _head(self, text: str) -> str:
        for at, char in enumerate(text):
            if self._position in _SPACED and char in _SPACE:
                continue
            if char != _HEAD[self._position]:
                return self._other(text)
            self._position += 1
            if self._position == len(_HEAD):
                self._held.clear()
                self._read = self._string
                return self._string(text[at + 1 :])
        self._held.append(text)
        return ""

    def _other(self, text: str) -> str:
        self._held.append(text)
        if self._position:
            self._read = self._object
            return ""
        self._read = self._verbatim
        begun = "".join(self._held)
        self._held.clear()
        return begun

    def _object(self, text: str) -> str:
        self._held.append(text)
        return ""

    def _verbatim(self, text: str) -> str:
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
                self._read = self._after_string
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

    def _after_string(self, _text: str) -> str:
        return ""


def _decoded(escape: str) -> str:
    """Decode an escape sequence."""
    try:
        value = str(json.loads(f'"{escape}"', strict=False))
    except ValueError:
        return escape
    return _UNKNOWN if "\ud800" <= value <= "\udfff" and len(value) == 1 else value
