"""Check of a grammar made of several constraints, which names the one at fault or goes without it."""

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

import msgspec

from tercet.frontend.errors import BadRequestError
from tercet.frontend.model.served_model import ServedModel
from tercet.frontend.structured_output.checker import GrammarChecker
from tercet.protocol.messages.values import Grammar

_MOST_SECONDS = 4.0
"""Time for the search of the part at fault."""
_REFUSED = "The grammar is refused: "
_INNER = re.compile(
    r"[:(]?\s*(?:\(And|\(Regex|\(Search|\(Or|\(Not|rule_|TERMINAL_|grammar_\d|%|/|\{|<|at line|[a-z_]+\(\d+\)).*",
    re.DOTALL,
)
"""Begin of text in llguidance's messages that quotes its own rules."""
_MEANINGS = {"Unsatisfiable": "no value satisfies it", "limit": "it is too complex", "fuel": "it is too complex"}


class GrammarPart(msgspec.Struct, frozen=True, kw_only=True):
    """Constraint of a composition, as a grammar of its own."""

    grammar: Grammar
    param: str
    tool: str = ""
    """Name of the tool whose arguments it is about; empty for the constraint on the whole answer."""
    optional: bool = False
    """The answer may go without this constraint."""


class Composition(msgspec.Struct, frozen=True, kw_only=True):
    """Constraints that make one grammar."""

    parts: Callable[[], Sequence[GrammarPart]]
    without: Callable[[AbstractSet[str]], Grammar]
    """Returns the grammar in which the named tools take any arguments."""


async def checked(
    checker: GrammarChecker, grammar: Grammar, composition: Composition | None, model: ServedModel, param: str
) -> Grammar:
    """Return a grammar that compiles: the given one, or one without the optional parts that do not.

    Raises BadRequestError that names the part at fault.
    """
    try:
        await checker.check(grammar, model, param)
    except BadRequestError as error:
        if composition is None:
            raise
        faulty = await _faulty(checker, await asyncio.to_thread(composition.parts), model)
        if not faulty:
            message = "The tools and the format together are too complex for one grammar."
            raise BadRequestError(message, param=param, code=error.code) from error
        grammar = await asyncio.to_thread(composition.without, faulty)
        await checker.check(grammar, model, param)
    return grammar


async def _faulty(checker: GrammarChecker, parts: Sequence[GrammarPart], model: ServedModel) -> set[str]:
    """Return the names of tools whose optional constraints do not compile. Raises BadRequestError for another part."""
    found: set[str] = set()
    end = time.monotonic() + _MOST_SECONDS
    for part in parts:
        if time.monotonic() > end:
            break
        try:
            await checker.check(part.grammar, model, part.param)
        except BadRequestError as error:
            if not part.tool:
                raise
            if not part.optional:
                message = f"Tool '{part.tool}': its schema cannot be enforced: {_reason(error.message)}."
                raise BadRequestError(message, param=part.param, code=error.code) from error
            found.add(part.tool)
    return found


def _reason(message: str) -> str:
    """Return a refusal without the text of rules that the client has not written."""
    text = message.removeprefix(_REFUSED).removesuffix(".")
    known = next((meaning for word, meaning in _MEANINGS.items() if word in text), None)
    return known or _INNER.sub("", text).strip(" :,;") or "it does not compile"
