"""Rules of a Lark grammar, as they are collected."""

import re
from collections.abc import Iterable

from tercet.frontend.grammar.lark import LarkWriter
from tercet.frontend.grammar.spec import Tokens


class Rules:
    """Names and keeps rules. Texts are written with the model's added tokens as tokens."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self.literal = LarkWriter(tokens).literal
        self._rules: list[str] = []

    def add(self, body: str, options: str = "") -> str:
        """A rule's name."""
        name = f"rule_{len(self._rules) + 1}"
        self._rules.append(f"{name}{f'[{options}]' if options else ''}: {body}")
        return name

    def terminal(self, body: str) -> str:
        """A terminal's name: what one lexeme matches."""
        name = f"TERMINAL_{len(self._rules) + 1}"
        self._rules.append(f"{name}: {body}")
        return name

    def text(self, start: str) -> str:
        """The grammar that begins with `start`."""
        return "\n".join([f"start: {start}", *self._rules]) + "\n"


def escaped(text: str) -> str:
    """A text within a terminal between slashes."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")


def any_token_but(token_ids: Iterable[int]) -> str:
    """Any token but these."""
    ids = ",".join(map(str, sorted(set(token_ids))))
    return f"<[^{ids}]>" if ids else "<[*]>"


def one_token_of(token_ids: Iterable[int]) -> str:
    """Any of these tokens."""
    return f"<[{','.join(map(str, sorted(set(token_ids))))}]>"
