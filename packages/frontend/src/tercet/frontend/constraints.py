"""What an answer can be asked to look like, whichever endpoint asked. `compiler.to_grammar` makes a `Grammar` of it.

`param` is the parameter that asked, for error messages.
"""

from typing import Any

import msgspec


class JsonObject(msgspec.Struct, frozen=True, kw_only=True):
    """Any JSON object."""

    param: str = "response_format"


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True):
    """An instance of a JSON schema. With `strict` the schema itself must keep to OpenAI's rules for strict schemas."""

    schema: dict[str, Any] | bool
    strict: bool = False
    name: str = ""
    param: str = "response_format.json_schema.schema"


class Regex(msgspec.Struct, frozen=True, kw_only=True):
    """Text that a regular expression matches from its first to its last character."""

    pattern: str
    param: str = "regex"


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Exactly one of some texts."""

    options: list[str]
    param: str = "structured_outputs.choice"


class Ebnf(msgspec.Struct, frozen=True, kw_only=True):
    """A context-free grammar whose first rule is `root`, in GBNF (`::=`) or in Lark, which are told apart."""

    text: str
    param: str = "ebnf"


class Lark(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar as llguidance reads it; our own, or written by somebody who knows that."""

    text: str
    param: str = "grammar"


class Tag(msgspec.Struct, frozen=True, kw_only=True):
    """`begin`, something constrained, `end`. A text that is one of the model's added tokens stands for that token."""

    begin: str
    content: "Constraint"
    end: str = ""


class StructuralTag(msgspec.Struct, frozen=True, kw_only=True):
    """Free text in which every occurrence of a trigger begins one of the tags.

    Each tag's `begin` starts with one of the `triggers`. With `at_least_one` some tag has to come; with `only_one` the
    text ends behind the first. Without `free` there is no text around the tags, only `separator` between them.
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
    """What a grammar must know of a model's vocabulary."""

    added: dict[str, int] = {}
    """Added tokens, special or not: a grammar names them by id, since ordinary text never matches them."""
    eos: list[int] = []
