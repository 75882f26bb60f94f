"""Rules of a Lark grammar, as they are collected."""

import re
from collections.abc import Iterable

from tercet.frontend.constraints import Tokens
from tercet.frontend.errors import BadRequestError
from tercet.frontend.structured_output.lark import LarkWriter
from tercet.frontend.structured_output.limits import MAX_TEXT


class Rules:
    """Names and keeps rules. Texts are written with the model's added tokens as tokens."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self.literal = LarkWriter(tokens).literal
        self._rules: list[str] = []
        self._size = 0

    def add(self, body: str, options: str = "") -> str:
        """A rule's name. Raises BadRequestError when all rules together are too long."""
        name = f"rule_{len(self._rules) + 1}"
        return self._keep(name, f"{name}{f'[{options}]' if options else ''}: {body}")

    def terminal(self, body: str) -> str:
        """A terminal's name: what one lexeme matches. Raises BadRequestError, as `add` does."""
        name = f"TERMINAL_{len(self._rules) + 1}"
        return self._keep(name, f"{name}: {body}")

    def _keep(self, name: str, rule: str) -> str:
        self._size += len(rule)
        check_size(self._size)
        self._rules.append(rule)
        return name

    def text(self, start: str) -> str:
        """The grammar that begins with `start`."""
        return "\n".join([f"start: {start}", *self._rules]) + "\n"


def check_size(size: int) -> None:
    """Raises BadRequestError for more bytes than a grammar may have."""
    if size > MAX_TEXT:
        raise BadRequestError(f"The grammar of tools and format is longer than {MAX_TEXT} bytes.", param="tools")


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
