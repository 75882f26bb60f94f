"""Builder of Lark grammars."""

import re
from collections.abc import Iterable

from tercet.frontend.constraints import Tokens
from tercet.frontend.errors import BadRequestError
from tercet.frontend.structured_output.lark import LarkWriter
from tercet.frontend.structured_output.limits import MAX_TEXT


class Rules:
    """Collection of rules and terminals. Texts of added tokens are written as tokens."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self.literal = LarkWriter(tokens).literal
        self._rules: list[str] = []
        self._size = 0

    def add(self, body: str, options: str = "") -> str:
        """Add a rule and return its name. Raises BadRequestError if the grammar becomes too long."""
        name = f"rule_{len(self._rules) + 1}"
        return self._keep(name, f"{name}{f'[{options}]' if options else ''}: {body}")

    def terminal(self, body: str) -> str:
        """Add a terminal, a single lexeme, and return its name. Raises BadRequestError beyond the maximum size."""
        name = f"TERMINAL_{len(self._rules) + 1}"
        return self._keep(name, f"{name}: {body}")

    def _keep(self, name: str, rule: str) -> str:
        self._size += len(rule)
        check_size(self._size)
        self._rules.append(rule)
        return name

    def text(self, start: str) -> str:
        """Return the grammar with this start rule."""
        return "\n".join([f"start: {start}", *self._rules]) + "\n"


def check_size(size: int) -> None:
    """Raise BadRequestError for a grammar of too many bytes."""
    if size > MAX_TEXT:
        raise BadRequestError(f"The grammar of tools and format is longer than {MAX_TEXT} bytes.", param="tools")


def escaped(text: str) -> str:
    """Escape text for a terminal between slashes."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")


def any_token_but(token_ids: Iterable[int]) -> str:
    """Return the expression for any token except these."""
    ids = ",".join(map(str, sorted(set(token_ids))))
    return f"<[^{ids}]>" if ids else "<[*]>"


def one_token_of(token_ids: Iterable[int]) -> str:
    """Return the expression for any of these tokens."""
    return f"<[{','.join(map(str, sorted(set(token_ids))))}]>"
