"""Sandboxed jinja2 with the functions and filters that templates of the Hub expect, and the names in a template.

Names are found in the syntax tree: words in comments and in the text of the template do not count.
"""

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import msgspec
from jinja2 import Template, meta, nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tercet.frontend.json_number import json_text


class RefusalError(Exception):
    """A template called `raise_exception`, with a reason for the client."""


class ParsedTemplate(msgspec.Struct, frozen=True):
    """Compiled template and the names in it."""

    template: Template
    variables: frozenset[str]
    """Variables that a caller may set."""
    reads_tools: bool
    words: frozenset[str]
    """Names of attributes and whole strings: keys of messages, and words that values are compared with."""


class _GenerationBlock(Extension):
    """Jinja extension that renders the body of `{% generation %}`, which marks assistant text for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def parse_template(source: str) -> ParsedTemplate:
    """Compile a template. Raises ValueError if it does not parse."""
    environment = _environment()
    try:
        tree = environment.parse(source)
        undeclared = meta.find_undeclared_variables(tree)
        attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
        strings = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        settable = undeclared & (_read_first(tree) | _asked_for(tree))
        template = environment.from_string(tree)  # changes the tree
    except (TemplateSyntaxError, SyntaxError, RecursionError) as error:  # jinja2 compiles templates to Python
        raise ValueError(f"the chat template does not parse: {error}") from error
    return ParsedTemplate(template, frozenset(settable), "tools" in undeclared, frozenset(attributes | strings))


def _read_first(tree: nodes.Template) -> set[str]:
    """Return names that the template reads before it sets them: others are its own, even if set in one branch only."""
    first: dict[str, str] = {}
    for name in _names(tree):
        first.setdefault(name.name, name.ctx)
    return {name for name, ctx in first.items() if ctx == "load"}


def _asked_for(tree: nodes.Template) -> set[str]:
    """Return names that the template tests for being defined, or that have a default."""
    tests = [node.node for node in tree.find_all(nodes.Test) if node.name in ("defined", "undefined")]
    defaults = [node.node for node in tree.find_all(nodes.Filter) if node.name in ("default", "d")]
    return {node.name for node in (*tests, *defaults) if isinstance(node, nodes.Name)}


def _names(node: nodes.Node) -> Iterator[nodes.Name]:
    """Generate names in the order in which they are evaluated."""
    if isinstance(node, nodes.Name):
        yield node
    children = [*node.iter_child_nodes()]
    if isinstance(node, nodes.Assign | nodes.For):  # the target comes first in the tree
        children = [*children[1:2], children[0], *children[2:]]
    for child in children:
        yield from _names(child)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode as JSON without the HTML escapes of jinja2's own filter, numbers with all digits."""
    return json_text(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise RefusalError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment
