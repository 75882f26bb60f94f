"""Translation of GBNF, the notation of llama.cpp, SGLang and vLLM, to Lark.

A rule that refers to no recursive rule becomes a terminal: llguidance splits text into the longest terminals that fit,
and a rule of single characters would be slow. A grammar without recursion is thus one regular expression, and exact;
where a terminal could end earlier than it does, only its longest form is found.
"""

import re
from collections.abc import Iterator

import msgspec
import orjson

from tercet.frontend.errors import BadRequestError
from tercet.frontend.structured_output.limits import MAX_DEPTH, MAX_GBNF, MAX_SET, MAX_SYMBOLS

_TOKEN = re.compile(
    r"""
    (?P<space>\s+|\#[^\n]*)
  | (?P<rule>[A-Za-z_][\w.-]*)\s*::=
  | (?P<name>[A-Za-z_][\w.-]*)
  | (?P<string>"(?:[^"\\\n]|\\.)*")
  | (?P<chars>\[(?:[^\]\\\n]|\\.)*\])
  | (?P<look>\(\s*[=!])
  | (?P<times>\{\s*\d{0,6}\s*(?:,\s*\d{0,6}\s*)?\}|[*+?])
  | (?P<mark>[|().])
    """,
    re.VERBOSE | re.ASCII,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|([^\\])", re.DOTALL)
_SIMPLE = {"n": "\n", "r": "\r", "t": "\t", "0": "\0"}


class _Rule(msgspec.Struct):
    """Rule in Lark, with references that are still to be renamed."""

    name: str
    words: list["str | _Reference"]
    refers: set[str]


class _Reference(msgspec.Struct, frozen=True):
    name: str


def to_lark(text: str, param: str) -> str:
    """Return the Lark of a GBNF grammar; a text without `::=` is taken to be Lark already. Raises BadRequestError."""
    if len(text) > MAX_GBNF:
        raise BadRequestError(f"The grammar is longer than {MAX_GBNF} characters.", param=param)
    if "::=" not in text:
        if text.lstrip().startswith("{"):
            raise BadRequestError("A grammar begins with a rule.", param=param)
        return text
    rules = _Parser(text, param).rules()
    if "root" not in rules:
        raise BadRequestError("The grammar has no rule 'root'.", param=param)
    for rule in rules.values():
        for name in sorted(each for each in rule.refers if each not in rules):
            raise BadRequestError(
                f"The grammar has no rule '{name[:64]}', which '{rule.name[:64]}' names.", param=param
            )
    terminals = _terminals(rules)
    names = {
        name: f"{'TERMINAL' if name in terminals else 'rule'}_{place}" for place, name in enumerate(rules, start=1)
    }
    lines = [f"start: {names['root']}"]
    for name, rule in rules.items():
        words = [names[word.name] if isinstance(word, _Reference) else word for word in rule.words]
        lines.append(f"{names[name]}: {' '.join(words)}")
    return "\n".join(lines) + "\n"


def _terminals(rules: dict[str, _Rule]) -> set[str]:
    """Return the names of the rules from which no recursion can be reached."""
    open_references = {name: len(rule.refers) for name, rule in rules.items()}
    referrers: dict[str, list[str]] = {name: [] for name in rules}
    for name, rule in rules.items():
        for each in rule.refers:
            referrers[each].append(name)
    found = [name for name, count in open_references.items() if count == 0]
    for name in found:
        for each in referrers[name]:
            open_references[each] -= 1
            if open_references[each] == 0:
                found.append(each)
    return set(found)


class _Parser:
    """Single-pass parser. `_begun` is true if an element stands before the current position."""

    def __init__(self, text: str, param: str) -> None:
        self._text = text
        self._param = param
        self._depth = 0
        self._begun = False
        self._rules: dict[str, _Rule] = {}
        self._rule: _Rule | None = None

    def rules(self) -> dict[str, _Rule]:
        """Return rules by name, in order."""
        for count, (kind, word) in enumerate(self._words()):
            if count > MAX_SYMBOLS:
                raise self._refusal(f"more than {MAX_SYMBOLS} symbols")
            if kind == "rule":
                self._open(word)
            elif self._rule is None:
                raise self._refusal(f"{word[:32]!r} before the first rule")
            else:
                self._take(self._rule, kind, word)
        self._close()
        return self._rules

    def _words(self) -> Iterator[tuple[str, str]]:
        at = 0
        while at < len(self._text):
            found = _TOKEN.match(self._text, at)
            if found is None:
                raise self._refusal(f"{self._text[at : at + 32]!r} is not understood")
            at = found.end()
            kind = found.lastgroup or ""
            if kind != "space":
                yield kind, found[kind]

    def _open(self, name: str) -> None:
        self._close()
        if name in self._rules:
            raise self._refusal(f"two rules '{name[:64]}'")
        self._rule = self._rules[name] = _Rule(name, [], set())

    def _close(self) -> None:
        if self._depth:
            raise self._refusal("a bracket is not closed")
        if self._rule is not None:
            self._end_sequence(self._rule)

    def _end_sequence(self, rule: _Rule) -> None:
        if not self._begun:
            rule.words.append('""')
        self._begun = False

    def _take(self, rule: _Rule, kind: str, word: str) -> None:
        match kind, word:
            case "name", _:
                rule.refers.add(word)
                rule.words.append(_Reference(word))
            case "string", _:
                rule.words.append(orjson.dumps(self._unescaped(word[1:-1])).decode())
            case "chars", _:
                rule.words.append(f"/{self._class(word[1:-1])}/")
            case "look", _:
                raise self._refusal("lookahead is not supported")
            case "times", _:
                if not self._begun:
                    raise self._refusal(f"nothing to repeat before {word!r}")
                rule.words.append(self._times(word))
            case _, ".":
                rule.words.append("/(?s:.)/")
            case _, "(":
                self._depth += 1
                if self._depth > MAX_DEPTH:
                    raise self._refusal(f"more than {MAX_DEPTH} brackets within one another")
                rule.words.append("(")
            case _, "|":
                self._end_sequence(rule)
                rule.words.append("|")
            case _, ")":
                if not self._depth:
                    raise self._refusal("a bracket too many")
                self._depth -= 1
                self._end_sequence(rule)
                rule.words.append(")")
        self._begun = word not in {"(", "|"}

    def _times(self, word: str) -> str:
        if not word.startswith("{"):
            return word
        bounds = [each.strip() for each in word[1:-1].split(",")]
        least = bounds[0] or "0"
        return f"{{{least},{bounds[-1]}}}" if len(bounds) > 1 else f"{{{least}}}"

    def _unescaped(self, body: str) -> str:
        if "\\" not in body:
            return body
        return "".join(self._character(found) for found in _ESCAPE.finditer(body))

    def _character(self, found: re.Match[str]) -> str:
        code = found[1] or found[2] or found[3]
        if code is None:
            return _SIMPLE.get(found[4], found[4]) if found[4] else found[5]
        value = int(code, 16)
        if value > 0x10FFFF or 0xD800 <= value <= 0xDFFF:
            raise self._refusal(f"{found[0]} is no character")
        return chr(value)

    def _class(self, body: str) -> str:
        """Return a set of characters, each written as its code point."""
        negated = body.startswith("^")
        found = list(_ESCAPE.finditer(body[negated:]))
        if not 0 < len(found) <= MAX_SET:
            raise self._refusal(f"a set of no characters, or of more than {MAX_SET}")
        written = [
            "-" if each[0] == "-" and 0 < place < len(found) - 1 else f"\\x{{{ord(self._character(each)):x}}}"
            for place, each in enumerate(found)
        ]
        return f"[{'^' if negated else ''}{''.join(written)}]"

    def _refusal(self, message: str) -> BadRequestError:
        return BadRequestError(f"The grammar cannot be read: {message}.", param=self._param)
