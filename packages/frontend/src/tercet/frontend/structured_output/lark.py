"""Composition of constraints into one Lark grammar: each becomes an expression and the rules that it needs."""

import re
from collections.abc import Iterable
from typing import assert_never

import orjson

from tercet.frontend.constraints import (
    Choice,
    Constraint,
    Ebnf,
    JsonObject,
    JsonSchema,
    Lark,
    Regex,
    StructuralTag,
    Tag,
    Tokens,
)
from tercet.frontend.errors import BadRequestError
from tercet.frontend.structured_output.ebnf import to_lark
from tercet.frontend.structured_output.json_schema import check_schema, schema_text
from tercet.frontend.structured_output.limits import MAX_OPTIONS, MAX_TAG_TEXT, MAX_TAGS

OBJECT = {"type": "object"}
_ESCAPED_OR_SLASH = re.compile(r"\\.|/|\n", re.DOTALL)
_WITHIN_SLASHES = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}


def lark_string(text: str) -> str:
    """Return a text as a Lark string."""
    return orjson.dumps(text).decode()


def regex_terminal(pattern: str) -> str:
    """Return a regular expression as a Lark terminal."""
    return f"/{_ESCAPED_OR_SLASH.sub(lambda found: _WITHIN_SLASHES.get(found[0], found[0]), pattern)}/"


class LarkWriter:
    """Collector of rules. Its names cannot collide with a user's, whose rules stand in separate grammars."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._rules: list[str] = []
        self._beside: list[dict[str, str]] = []
        self._names = 0
        self._has_text = False
        added = sorted(filter(None, tokens.added), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, added))) if added else None

    def grammar(self, constraint: Constraint) -> str:
        """Return the whole grammar: Lark, or llguidance's list of grammars if it contains users' grammars."""
        start = self.expression(constraint)
        lark = "\n".join([f"start: {start}", *self._rules]) + "\n"
        if not self._beside:
            return lark
        return orjson.dumps({"grammars": [{"name": "tercet", "lark_grammar": lark}, *self._beside]}).decode()

    def expression(self, constraint: Constraint) -> str:
        """Return the right side of a rule for a constraint. Raises BadRequestError."""
        match constraint:
            case JsonObject():
                return f"%json {schema_text(OBJECT, constraint.param)}"
            case JsonSchema():
                check_schema(constraint.schema, constraint.param, strict=constraint.strict)
                text = schema_text(constraint.schema, constraint.param, strict=constraint.strict)
                return f"%json {text}"
            case Regex():
                return self._terminal(regex_terminal(constraint.pattern))
            case Choice():
                return self._choice(constraint)
            case Ebnf():
                return self._subgrammar(to_lark(constraint.text, constraint.param))
            case Lark():
                return self._subgrammar(constraint.text)
            case StructuralTag():
                return self._structural(constraint)
        assert_never(constraint)

    def literal(self, text: str) -> str:
        """Return the expression for a text in which the model's added tokens are single tokens; empty for no text."""
        parts, at = [], 0
        for found in self._added.finditer(text) if self._added else ():
            if found.start() > at:
                parts.append(lark_string(text[at : found.start()]))
            parts.append(f"<[{self._tokens.added[found[0]]}]>")
            at = found.end()
        if at < len(text):
            parts.append(lark_string(text[at:]))
        return " ".join(parts)

    # Expressions, by kind of constraint.

    def _choice(self, choice: Choice) -> str:
        if not 0 < len(choice.options) <= MAX_OPTIONS:
            raise BadRequestError(f"Give 1 to {MAX_OPTIONS} texts to choose from.", param=choice.param)
        return self._rule(" | ".join(map(lark_string, choice.options)))

    def _structural(self, structural: StructuralTag) -> str:
        if not 0 < len(structural.tags) <= MAX_TAGS:
            raise BadRequestError(f"Give 1 to {MAX_TAGS} tags.", param=structural.param)
        around = sum(len(each.begin) + len(each.end) for each in structural.tags) + len(structural.separator)
        if around > MAX_TAG_TEXT:
            raise BadRequestError(
                f"More than {MAX_TAG_TEXT} characters begin and end the tags.", param=structural.param
            )
        if not structural.free:
            return self._only_tags(structural)
        heads: dict[str, list[str]] = {}
        for tag in structural.tags:
            trigger = next((each for each in structural.triggers if each and tag.begin.startswith(each)), None)
            if trigger is None:
                raise BadRequestError("Every tag must begin with one of the triggers.", param=structural.param)
            heads.setdefault(trigger, []).append(self._body(tag, tag.begin[len(trigger) :]))
        self._need_text()
        opened = [self._tokens.added[each] for each in heads if each in self._tokens.added]
        called = self._rule(
            " | ".join(f"{self._text_before_trigger(each)} ({' | '.join(bodies)})" for each, bodies in heads.items())
        )
        others = sorted(set(self._tokens.added.values()) - {*opened, *self._tokens.eos})
        free = f"(FREE_TEXT {_token_set(others)})*" if others else ""
        more = "" if structural.only_one else f"({called} {free})*"
        first = f"{free} {called}" + ("" if structural.only_one else f" {free} {more} FREE_TEXT")
        return self._rule(first if structural.at_least_one else f"{first} | {free} FREE_TEXT")

    def _only_tags(self, structural: StructuralTag) -> str:
        tag = self._rule(" | ".join(self._body(each, each.begin) for each in structural.tags))
        more = "" if structural.only_one else f" ({self.literal(structural.separator)} {tag})*"
        return self._rule(f"{tag}{more}" if structural.at_least_one else f"({tag}{more})?")

    def _text_before_trigger(self, trigger: str) -> str:
        """Return the expression for free text up to and including a trigger."""
        if trigger in self._tokens.added:
            return f"FREE_TEXT <[{self._tokens.added[trigger]}]>"
        return self._rule(f"FREE_TEXT {lark_string(trigger)}", "lazy")

    def _body(self, tag: Tag, begin: str) -> str:
        return self._rule(f"{self.literal(begin)} {self.expression(tag.content)} {self.literal(tag.end)}")

    # Names.

    def _rule(self, body: str, options: str = "") -> str:
        self._names += 1
        name = f"rule_{self._names}"
        self._rules.append(f"{name}{f'[{options}]' if options else ''}: {body}")
        return name

    def _terminal(self, body: str) -> str:
        self._names += 1
        self._rules.append(f"TERMINAL_{self._names}: {body}")
        return f"TERMINAL_{self._names}"

    def _need_text(self) -> None:
        if not self._has_text:
            self._rules.append("FREE_TEXT: /(?s:.*)/")
            self._has_text = True

    def _subgrammar(self, lark: str) -> str:
        """Add a separate grammar with names of its own, and return a reference to it."""
        name = f"grammar_{len(self._beside) + 1}"
        self._beside.append({"name": name, "lark_grammar": lark})
        return f"@{name}"


def _token_set(token_ids: Iterable[int]) -> str:
    """Return the expression for any of these tokens."""
    spans: list[list[int]] = []
    for each in token_ids:
        if spans and spans[-1][1] == each - 1:
            spans[-1][1] = each
        else:
            spans.append([each, each])
    return "<[" + ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans) + "]>"
