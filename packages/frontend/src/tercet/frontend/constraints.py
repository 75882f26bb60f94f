"""Constraints on answers, independent of the endpoint; `compiler.to_grammar` compiles them.

`param` is the client's parameter name, for error messages.
"""

from typing import Any

import msgspec


class JsonObject(msgspec.Struct, frozen=True, kw_only=True):
    """Any JSON object."""

    param: str = "response_format"


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True):
    """Instance of a JSON schema; with `strict`, the schema must follow OpenAI's rules for strict schemas."""

    schema: dict[str, Any] | bool
    strict: bool = False
    name: str = ""
    param: str = "response_format.json_schema.schema"


class Regex(msgspec.Struct, frozen=True, kw_only=True):
    """Text that matches a regular expression as a whole."""

    pattern: str
    param: str = "regex"


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Exactly one of several texts."""

    options: list[str]
    param: str = "structured_outputs.choice"


class Ebnf(msgspec.Struct, frozen=True, kw_only=True):
    """Context-free grammar with the root rule `root`, in GBNF (`::=`) or in Lark, which is detected."""

    text: str
    param: str = "ebnf"


class Lark(msgspec.Struct, frozen=True, kw_only=True):
    """Grammar in llguidance's Lark dialect."""

    text: str
    param: str = "grammar"


class Tag(msgspec.Struct, frozen=True, kw_only=True):
    """Sequence of `begin`, a constrained text and `end`. The text of an added token stands for that token."""

    begin: str
    content: "Constraint"
    end: str = ""


class StructuralTag(msgspec.Struct, frozen=True, kw_only=True):
    """Free text in which every occurrence of a trigger begins one of the tags.

    Each tag's `begin` starts with one of the `triggers`. With `at_least_one` at least one tag must occur; with
    `only_one` the text ends after the first. Without `free` there is no text around the tags, only `separator` between
    them.
    """

    tags: list[Tag]
    triggers: list[str]
    at_least_one: bool = False
    only_one: bool = False
    free: bool = True
    separator: str = ""
    param: str = "response_format"


Constraint = JsonObject | JsonSchema | Regex | Choice | Ebnf | Lark | StructuralTag


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a model's vocabulary that grammars refer to."""

    added: dict[str, int] = {}
    """Added tokens, special or not. A grammar refers to them by id, since ordinary text never matches them."""
    eos: list[int] = []
