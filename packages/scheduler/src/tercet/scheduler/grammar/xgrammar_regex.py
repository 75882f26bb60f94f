r"""Conversion of regular expressions from llguidance's (Rust's) syntax for xgrammar.

xgrammar reads another dialect: its dot matches line breaks, flags and `\x{41}` are not understood, and an anchor inside
a pattern is ignored. Every set of characters is therefore written out, and anything without an equivalent is refused.
`\d` and `\w`, as well as their opposites, are restricted to ASCII: some valid texts are lost, but no invalid one
passes.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from tercet.scheduler.grammar.port import GrammarError

Spans = Sequence[tuple[int, int]]
"""Ranges of code points, both ends included."""

_LAST = 0x10FFFF
_NO_CHARACTERS: Spans = [(0xD800, 0xDFFF)]
_UNWRITABLE: Spans = [*_NO_CHARACTERS, (0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x7F, 0x7F)]
"""Code points that a JSON string cannot contain without escapes."""
_REPETITION = re.compile(r"([*+?]|\{\d+(?:,\d*)?\})\??")
_NEVER = {"{0}", "{0,0}"}
_GROUP = re.compile(r"\((?:\?(?:P?<(?P<name>\w+)>|(?P<flags>[a-zA-Z]*)(?P<off>-[a-zA-Z]+)?(?P<end>[:)])))?")
_ESCAPE = re.compile(r"\\(?:x\{(\w+)\}|u\{(\w+)\}|x(\w\w)|u(\w{4})|U(\w{8})|(.))", re.DOTALL)
_HYPHEN = re.compile(r"-(?![-\]])")
_WRITTEN = re.compile(
    r"(?P<group>\(\?:)|(?P<times>[*+?]|\{\d+(?:,\d*)?\})|\[[^]]*\]|(?P<one>\\u\{\w+\}|[A-Za-z0-9])|[)|]"
)
_CODE = re.compile(r"\\u\{(\w+)\}")
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a"}
_WORD_BOUNDARIES = "<>"


class _Set(NamedTuple):
    """Code points that are surely in a set, and those that may be: its opposite surely has none of the latter."""

    surely: Spans
    perhaps: Spans

    def opposite(self) -> "_Set":
        return _Set(_all_but(self.perhaps), _all_but(self.surely))


def _all_but(spans: Spans) -> Spans:
    rest, at = [], 0
    for first, last in sorted(spans):
        if first > at:
            rest.append((at, first - 1))
        at = max(at, last + 1)
    return [*rest, (at, _LAST)] if at <= _LAST else rest


_BEYOND_ASCII = (0x80, _LAST)
_DIGITS = [(0x30, 0x39)]
_WORD = [*_DIGITS, (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_SPACE = [(0x09, 0x0D), (0x20, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)]
_SPACE += [(0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)]
_CLASSES = {
    "d": _Set(_DIGITS, [*_DIGITS, _BEYOND_ASCII]),
    "w": _Set(_WORD, [*_WORD, _BEYOND_ASCII]),
    "s": _Set(_SPACE, _SPACE),
}
_CLASSES |= {name.upper(): each.opposite() for name, each in _CLASSES.items()}
_ANY: Spans = [(0, _LAST)]
_IN_LINE: Spans = _all_but([(0x0A, 0x0A)])


def rewritten(pattern: str, flags: str = "") -> str:
    """Return the converted pattern of whole texts. Raises GrammarError."""
    return _Reader(pattern, _checked(flags)).whole()


def searching(pattern: str) -> str:
    """Return a pattern of JSON strings, without escapes, that contain the given one. Raises GrammarError."""
    return _Reader(pattern, "", searching=True).whole()


def as_rule(written: str) -> str:
    """Return a pattern converted here as the body of a rule in xgrammar's EBNF."""
    return " ".join(_body(found) for found in _WRITTEN.finditer(written)) or '""'


def _body(found: re.Match[str]) -> str:
    """Convert one sign; a repetition belongs to the sign before it."""
    text = _CODE.sub(lambda code: f"\\U{int(code[1], 16):08X}", found[0])
    if found["group"]:
        return "("
    return f"[{text}]" if found["one"] else text


class _Reader:
    """Recursive-descent parser of one pattern."""

    def __init__(self, pattern: str, flags: str, *, searching: bool = False) -> None:
        self._pattern = pattern
        self._flags = flags
        self._never = _UNWRITABLE if searching else _NO_CHARACTERS
        self._around = f"{self._written(_ANY)}*" if searching else ""
        self._at = 0

    def whole(self) -> str:
        text = self._choice("s" in self._flags, inside=False)
        if self._at < len(self._pattern):
            raise _refusal("a bracket that is not open")
        return text

    def _choice(self, dotall: bool, *, inside: bool) -> str:
        """Convert alternatives up to their closing bracket, or to the end. Flags hold for all that follow them."""
        branches: list[str] = []
        while True:
            branch, dotall = self._branch(dotall, inside=inside)
            branches.append(branch)
            if not self._pattern.startswith("|", self._at):
                break
            self._at += 1
        written = "|".join(filter(None, branches))
        return f"(?:{written})?" if written and "" in branches else written

    def _branch(self, dotall: bool, *, inside: bool) -> tuple[str, bool]:
        text = ""
        before = after = "" if inside else self._around
        while self._at < len(self._pattern) and (sign := self._pattern[self._at]) not in "|)":
            if sign == "(":
                group, dotall = self._group(dotall)
                text += self._repeated(group)
            elif sign not in "^$":
                text += self._repeated(self._written(self._characters(dotall)))
            else:
                self._at += 1
                if sign == "^" and not text and not inside:
                    before = ""
                elif sign == "$" and self._pattern[self._at : self._at + 1] in {"", "|"} and not inside:
                    after = ""
                else:
                    raise _refusal("an anchor within")
        return before + text + after, dotall

    def _group(self, dotall: bool) -> tuple[str, bool]:
        """Convert a group, or read flags for the rest, which give no text."""
        found = _GROUP.match(self._pattern, self._at)
        assert found is not None
        self._at = found.end()
        if found[0] == "(" and self._pattern.startswith("?", self._at):
            raise _refusal("lookaround")
        on, off = _checked(found["flags"] or ""), found["off"] or ""
        if off not in {"", "-s"}:
            raise _refusal(f"the flag '{off}'")
        within = (dotall or "s" in on) and not off
        if found["end"] == ")":
            return "", within
        text = self._choice(within, inside=True)
        if not self._pattern.startswith(")", self._at):
            raise _refusal("a bracket that is not closed")
        self._at += 1
        return f"(?:{text})" if text else "", dotall

    def _repeated(self, atom: str) -> str:
        """Append the repetitions that follow an atom. Laziness makes no difference to whole texts."""
        repeated = False
        while found := _REPETITION.match(self._pattern, self._at):
            self._at = found.end()
            sign = found[1]
            if sign in _NEVER:
                atom = ""
            if atom:
                atom = f"(?:{atom}){sign}" if repeated else f"{atom}{sign}"
                repeated = True
        return atom

    def _characters(self, dotall: bool) -> Spans:
        """Read a character, a dot, an escape or a set."""
        sign = self._pattern[self._at]
        if sign == "\\":
            return self._escaped().surely
        self._at += 1
        if sign == ".":
            return _ANY if dotall else _IN_LINE
        if sign == "[":
            return self._set()
        if sign in "*+?{":
            raise _refusal(f"{sign!r} after nothing")
        return [(ord(sign), ord(sign))]

    def _set(self) -> Spans:
        """Read the rest of a set in square brackets."""
        negated = self._pattern.startswith("^", self._at)
        self._at += negated
        begun, names = self._at, set[str]()
        surely, perhaps = list[tuple[int, int]](), list[tuple[int, int]]()
        while not self._pattern.startswith("]", self._at) or self._at == begun:
            if self._at >= len(self._pattern):
                raise _refusal("a set that is not closed")
            if self._pattern.startswith(("[", "&&", "--", "~~"), self._at):
                raise _refusal("a set within a set")
            names.add(self._pattern[self._at : self._at + 2])
            each = self._member()
            surely += each.surely
            perhaps += each.perhaps
        self._at += 1
        if any({f"\\{name}", f"\\{name.upper()}"} <= names for name in "dsw"):
            surely, perhaps = [*_ANY], [*_ANY]
        found = _Set(surely, perhaps)
        return (found.opposite() if negated else found).surely

    def _member(self) -> _Set:
        """Read a member of a set: a character, a range, or an escape that stands for several."""
        first = self._one()
        if not _is_one(first) or not _HYPHEN.match(self._pattern, self._at):
            return first
        self._at += 1
        last = self._one()
        if not _is_one(last) or last.surely[0] < first.surely[0]:
            raise _refusal("a range without an end")
        span = [(first.surely[0][0], last.surely[0][1])]
        return _Set(span, span)

    def _one(self) -> _Set:
        if self._at >= len(self._pattern):
            raise _refusal("a set that is not closed")
        if self._pattern[self._at] == "\\":
            return self._escaped()
        code = ord(self._pattern[self._at])
        self._at += 1
        return _Set([(code, code)], [(code, code)])

    def _written(self, spans: Spans) -> str:
        """Convert a set to xgrammar's notation."""
        kept = _all_but([*_all_but(spans), *self._never])
        if not kept:
            raise _refusal("a set of no characters")
        if _is_one(_Set(kept, kept)):
            return _character(kept[0][0])
        written = (_character(a) if a == b else f"{_character(a)}-{_character(b)}" for a, b in kept)
        return f"[{''.join(written)}]"

    def _escaped(self) -> _Set:
        found = _ESCAPE.match(self._pattern, self._at)
        if found is None:
            raise _refusal("a backslash at the end")
        self._at = found.end()
        *numbers, sign = found.groups()
        if sign in _CLASSES:
            return _CLASSES[sign]
        if sign is None:
            code = _number(next(filter(None, numbers)))
        elif sign in _CONTROLS:
            code = ord(_CONTROLS[sign])
        elif sign.isalnum() or sign in _WORD_BOUNDARIES or not sign.isascii():
            raise _refusal(f"'\\{sign}'")
        else:
            code = ord(sign)
        return _Set([(code, code)], [(code, code)])


def _is_one(found: _Set) -> bool:
    return len(found.surely) == 1 and found.surely[0][0] == found.surely[0][1]


def _number(digits: str) -> int:
    try:
        code = int(digits, 16)
    except ValueError:
        raise _refusal(f"the number {digits[:16]!r}") from None
    if code > _LAST:
        raise _refusal(f"the number {digits[:16]!r}")
    return code


def _checked(flags: str) -> str:
    """Return the flags. Raises GrammarError for all but `s` (dot matches all) and `u` (Unicode, the default)."""
    for flag in flags:
        if flag not in "su":
            raise _refusal(f"the flag {flag!r}")
    return flags


def _character(code: int) -> str:
    sign = chr(code)
    return sign if sign.isascii() and sign.isalnum() else f"\\u{{{code:x}}}"


def _refusal(what: str) -> GrammarError:
    return GrammarError(f"xgrammar is not given regular expressions with {what}")
