"""Conversion of grammars from clients for xgrammar: exactly, or refused by name.

A JSON schema goes to xgrammar's own converter, after `_Schema` has refused what that cannot enforce. A Lark text goes
to xgrammar's own reader of Lark, with its schemas, regular expressions and token names replaced.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from xgrammar import Grammar as Rules
from xgrammar import TokenizerInfo

from tercet.protocol.messages.values import Grammar, GrammarKind
from tercet.scheduler.grammar.port import GrammarError
from tercet.scheduler.grammar.xgrammar_regex import as_rule, rewritten
from tercet.scheduler.grammar.xgrammar_schema import schema_rules

_IN_LARK = re.compile(
    r"""
    (?P<comment>(?:\#|//)[^\n]*)
  | (?P<string>"(?:[^"\\\n]|\\.)*")
  | /(?P<pattern>(?:[^/\\\n]|\\.)+)/(?P<flags>[a-z]*)
  | <\[(?P<ids>[\d\s,-]+)\]>
  | <\[(?:\^(?P<but>[\d\s,-]+)|(?P<any>\*))\]>
  | (?P<token><[^<>\s\[]+>)
  | (?P<schema>%json\b\s*)
  | ^[ \t]*[?!]?(?P<options>[\w-]+[ \t]*\[[^]\n]*\])
    """,
    re.VERBOSE | re.MULTILINE,
)


def rules_of(grammar: Grammar, tokens: TokenizerInfo, named_tokens: Mapping[str, int], end_ids: Sequence[int]) -> Rules:
    """Return the rules of a grammar. Raises GrammarError, and RuntimeError for syntax that xgrammar cannot read."""
    if grammar.thinking is not None:
        raise GrammarError("xgrammar limits no reasoning whose end marker is several tokens")
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return schema_rules(_parsed(grammar.text))
        case GrammarKind.REGEX:
            return Rules.from_ebnf(f"root ::= {as_rule(rewritten(grammar.text))}")
        case GrammarKind.LARK:
            return _Lark(tokens, named_tokens, end_ids).rules(grammar.text)


class _Lark:
    """Reader of one text, which may be a list of grammars that refer to each other."""

    def __init__(self, tokens: TokenizerInfo, named_tokens: Mapping[str, int], end_ids: Sequence[int]) -> None:
        self._tokens = tokens
        self._named_tokens = named_tokens
        self._end_ids = end_ids
        self._named: dict[str, Rules | str] = {}
        self._single: set[str] = set()
        """Tokens that stand alone in a rule. llguidance gives them precedence over "any token but".

        Here such a set excludes them; otherwise reasoning could continue as an answer, past its budget.
        """

    def rules(self, text: str) -> Rules:
        """Return the rules of the first grammar in the text."""
        listed = text.lstrip().startswith("{")
        grammars = _parsed(text).get("grammars", []) if listed else [{"name": "", "lark_grammar": text}]
        if not grammars or "lark_grammar" not in grammars[0]:
            raise GrammarError("a list of grammars begins with one in Lark")
        for each in grammars:
            self._single.update(map(str, self._singles(each.get("lark_grammar", ""))))
        for each in grammars[1:]:
            match each:
                case {"name": str(name), "lark_grammar": str(lark)}:
                    self._named[name] = self._replaced(lark)
                case {"name": str(name), "json_schema": schema}:
                    self._named[name] = schema_rules(schema)
                case _:
                    raise GrammarError("a grammar in a list has a name, and a text in Lark or a JSON schema")
        return Rules.from_lark(
            self._replaced(grammars[0]["lark_grammar"]), tokenizer_info=self._tokens, named_grammars=self._named
        )

    def _singles(self, text: str) -> Iterator[int]:
        for found in _IN_LARK.finditer(text):
            if (found["ids"] or "").isdigit():
                yield int(found["ids"])
            elif found["token"] in self._named_tokens:
                yield self._named_tokens[found["token"]]

    def _replaced(self, lark: str) -> str:
        """Return the text with replacements for all syntax that xgrammar would read differently."""
        parts: list[str] = []
        at = 0
        while found := _IN_LARK.search(lark, at):
            parts.append(lark[at : found.start()])
            at = found.end()
            if found["options"]:
                raise GrammarError(f"xgrammar is given no rules with options, as in {found['options'][:64]!r}")
            if found["pattern"]:
                written = rewritten(found["pattern"], found["flags"])
                parts.append(f"/{written}/" if written else '""')
            elif found["but"] or (found["any"] and self._single):
                parts.append(f"<[^{','.join(filter(None, [found['but'], *sorted(self._single)]))}]>")
            elif found["ids"] or found["token"]:
                parts.append(self._token_set(found["ids"] or str(self._token(found["token"]))))
            elif found["schema"]:
                schema, at = _decoded(lark, at)
                name = f"json-{len(self._named)}"
                self._named[name] = schema_rules(schema)
                parts.append(f" @{name} ")
            else:
                parts.append(found[0])
        return "".join([*parts, lark[at:]])

    def _token_set(self, ids: str) -> str:
        """Return the notation of a token set by ids. xgrammar allows an end token only at the end."""
        for span in ids.split(","):
            first, _, last = span.partition("-")
            if any(int(first) <= end <= int(last or first) for end in self._end_ids):
                raise GrammarError("xgrammar is given no end token within a grammar")
        return f"<[{ids}]>"

    def _token(self, name: str) -> int:
        if name not in self._named_tokens:
            raise GrammarError(f"there is no token {name[:64]}")
        return self._named_tokens[name]


def _decoded(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value at a position, and its end."""
    try:
        return json.JSONDecoder().raw_decode(text, at)
    except ValueError as error:
        raise GrammarError(f"a JSON schema is not JSON: {error}") from error


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise GrammarError(f"a JSON schema is not JSON: {error}") from error
