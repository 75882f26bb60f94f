r"""Translation of ECMAScript's regular expressions, as JSON Schema has them, to those of Rust's `regex` crate.

The same text means different things in both: `[a&&b]`, `\w`, `.`, `\cA`, `^{a}$`. Every class is written out, and every
other character is escaped. Of old syntax without the flag `u`, a bracket that begins nothing is itself. `\A` at the
start and `\Z` or `\z` at the end are anchors, as in Python and Rust: ECMAScript has no such escapes.
"""

import re
from typing import NamedTuple

_LAST = 0x10FFFF
_DIGIT = "0-9"
_WORD = "0-9A-Z_a-z"
_SPACE = r"\x{9}-\x{d}\x{20}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{feff}"
_CLASSES = {
    "d": _DIGIT,
    "w": _WORD,
    "s": _SPACE,
    "D": rf"\x{{0}}-/:-\x{{{_LAST:x}}}",
    "W": rf"\x{{0}}-/:-@\x{{5b}}-\x{{5e}}\x{{60}}\x{{7b}}-\x{{{_LAST:x}}}",
    "S": (
        r"\x{0}-\x{8}\x{e}-\x{1f}\x{21}-\x{9f}\x{a1}-\x{167f}\x{1681}-\x{1fff}\x{200b}-\x{2027}\x{202a}-\x{202e}"
        r"\x{2030}-\x{205e}\x{2060}-\x{2fff}\x{3001}-\x{fefe}\x{ff00}-" + rf"\x{{{_LAST:x}}}"
    ),
}
_ANY = rf"[\x{{0}}-\x{{{_LAST:x}}}]"
_DOT = r"[^\n\r\x{2028}\x{2029}]"
_CONTROLS = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B, "0": 0x00}
_QUANTIFIER = re.compile(r"(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\})\??")
_GROUP = re.compile(r"\((?:\?:|\?P?<(?![=!])[^>]*>|(?P<flags>\?[a-zA-Z]*(?:-[a-zA-Z]+)?[:)])|(?P<other>\?)?)")
_PLAIN = re.compile(r"[A-Za-z0-9]+")
_PROPERTY = re.compile(r"\\[pP]\{\^?[A-Za-z0-9_=]+\}")
_ESCAPE = re.compile(
    r"\\(?:u\{(?P<code>[0-9a-fA-F]+)\}|u(?P<high>[dD][89abAB][0-9a-fA-F]{2})\\u(?P<low>[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|u(?P<four>[0-9a-fA-F]{4})|x(?P<two>[0-9a-fA-F]{2})|c(?P<control>[A-Za-z])|(?P<sign>.))",
    re.DOTALL,
)
_MOST_DEPTH = 100


class PatternError(ValueError):
    """A pattern that no grammar can express; the message completes "The pattern has "."""


class _Member(NamedTuple):
    """Member of a class: one code point, or the text of several."""

    code: int | None
    text: str


def translated(pattern: str) -> str:
    """Return the pattern in Rust's syntax, to be searched for like the original. Raises PatternError."""
    return _Reader(pattern).whole()


def _literal(code: int) -> str:
    sign = chr(code)
    return sign if sign.isascii() and sign.isalnum() else rf"\x{{{code:x}}}"


class _Reader:
    """Scanner of one pattern. Groups keep their brackets, so it needs no recursion."""

    def __init__(self, pattern: str) -> None:
        if any(0xD800 <= ord(sign) <= 0xDFFF for sign in pattern):
            raise PatternError("half a surrogate pair")
        self._pattern = pattern
        self._at = 0

    def whole(self) -> str:
        parts: list[str] = []
        depth, repeatable = 0, False
        if self._pattern.startswith(r"\A"):
            self._at = 2
            parts.append("^")
        while self._at < len(self._pattern):
            sign = self._pattern[self._at]
            found = _QUANTIFIER.match(self._pattern, self._at)
            if found and (repeatable or sign != "{"):
                if not repeatable:
                    raise PatternError("a repetition of nothing")
                self._at = found.end()
                parts.append(found[0])
                repeatable = False
            elif sign in "|^$":
                self._at += 1
                parts.append(sign)
                repeatable = False
            elif sign == "(":
                parts.append(self._group())
                depth += not parts[-1].endswith(")")
                if depth > _MOST_DEPTH:
                    raise PatternError(f"more than {_MOST_DEPTH} nested groups")
                repeatable = False
            elif sign == ")":
                self._at += 1
                parts.append(sign)
                depth -= 1
                if depth < 0:
                    raise PatternError("a ')' that closes nothing")
                repeatable = True
            else:
                parts.append(self._atom(sign))
                repeatable = parts[-1] != "$"
        if depth:
            raise PatternError("a '(' that is not closed")
        return "".join(parts)

    def _group(self) -> str:
        found = _GROUP.match(self._pattern, self._at)
        assert found is not None
        if found["other"]:
            raise PatternError("a look-around")
        self._at = found.end()
        flags = found["flags"]
        if flags and set(flags) - set("?ims-:)"):
            raise PatternError(f"the flags '{flags[:16]}'")
        return f"({flags}" if flags else "(?:"

    def _atom(self, sign: str) -> str:
        if sign == "[":
            return self._class()
        if sign == "\\":
            return self._escape_outside()
        if found := _PLAIN.match(self._pattern, self._at):
            self._at = found.end()
            return found[0]
        self._at += 1
        return _DOT if sign == "." else _literal(ord(sign))

    def _escape_outside(self) -> str:
        after = self._pattern[self._at + 1 : self._at + 2]
        if after in {"b", "B"}:
            raise PatternError("a word boundary")
        if after in set("123456789k"):
            raise PatternError("a back reference")
        if after in {"Z", "z"} and self._at + 2 == len(self._pattern):
            self._at += 2
            return "$"
        member = self._escape()
        return f"[{member.text}]" if member.code is None else member.text

    def _class(self) -> str:
        self._at += 1
        negated = self._pattern.startswith("^", self._at)
        self._at += negated
        members: list[str] = []
        while not self._pattern.startswith("]", self._at):
            first = self._member()
            if self._is_range(first):
                self._at += 1
                last = self._member()
                if last.code is None:  # the hyphen is a character, too
                    members += [first.text, _literal(ord("-")), last.text]
                elif first.code is not None and last.code < first.code:
                    raise PatternError("a range of which the end is before the start")
                else:
                    members.append(f"{first.text}-{last.text}")
            else:
                members.append(first.text)
        self._at += 1
        if not members:
            if negated:
                return _ANY
            raise PatternError("a class of no characters")
        return f"[{'^' if negated else ''}{''.join(members)}]"

    def _is_range(self, first: _Member) -> bool:
        next_two = self._pattern[self._at : self._at + 2]
        return first.code is not None and len(next_two) == len("-]") and next_two[0] == "-" and next_two[1] != "]"

    def _member(self) -> _Member:
        if self._at >= len(self._pattern):
            raise PatternError("a '[' that is not closed")
        sign = self._pattern[self._at]
        if sign == "\\":
            if self._pattern.startswith(r"\b", self._at):
                self._at += 2
                return _Member(0x08, _literal(0x08))
            return self._escape()
        self._at += 1
        return _Member(ord(sign), _literal(ord(sign)))

    def _escape(self) -> _Member:
        if found := _PROPERTY.match(self._pattern, self._at):
            self._at = found.end()
            return _Member(None, found[0])
        found = _ESCAPE.match(self._pattern, self._at)
        if found is None:
            raise PatternError("a backslash at its end")
        self._at = found.end()
        if found["sign"] in _CLASSES:
            return _Member(None, _CLASSES[found["sign"]])
        code = _code_of(found)
        if code > _LAST or 0xD800 <= code <= 0xDFFF:
            raise PatternError("a code point that no text has")
        return _Member(code, _literal(code))


def _code_of(found: re.Match[str]) -> int:
    if digits := found["code"] or found["four"] or found["two"]:
        return int(digits[-8:], 16) if len(digits.lstrip("0")) <= len("10ffff") else _LAST + 1
    if found["high"]:
        return 0x10000 + ((int(found["high"], 16) & 0x3FF) << 10) + (int(found["low"], 16) & 0x3FF)
    if found["control"]:
        return ord(found["control"]) % 32
    sign = found["sign"]
    return _CONTROLS[sign] if sign in _CONTROLS else ord(sign)
