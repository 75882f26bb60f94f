"""Grammar of tool calls in a model's own notation, for required, named and strict tools.

`ToolFraming` defines the text around arguments. Arguments in JSON follow the tool's schema. Arguments written key by
key follow the schema's order, with strings unquoted up to the marker that ends them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from tercet.frontend.chat.rules import Rules, escaped
from tercet.frontend.constraints import Regex
from tercet.frontend.errors import BadRequestError, UnsupportedParameterError
from tercet.frontend.json_number import json_text
from tercet.frontend.parsers.port import Style, ToolFraming, ToolSpec
from tercet.frontend.parsers.typed_value import STRING, UNKNOWN, json_types
from tercet.frontend.structured_output.json_schema import check_schema, schema_text, subschemas
from tercet.frontend.structured_output.lark import lark_string, regex_terminal
from tercet.frontend.structured_output.references import check_references

_EMPTY = '""'
_CALL_INDEX = re.compile(r"\$index")
_NO_TOOL = {"type": "object", "properties": {}, "additionalProperties": False}
_ONLY_IN_JSON = ("pattern", "format")
_WRITABLE_KEYS = {Style.TAGGED: re.compile(r"[^\s<>](?:[^\n<>]*[^\s<>])?"), Style.PYTHON: re.compile(r"\w+")}


class CallGrammar:
    """Writer of the rules for the calls of one answer."""

    def __init__(self, rules: Rules, framing: ToolFraming, tools: Sequence[ToolSpec], *, several: bool) -> None:
        ends_answer = rules.tokens.added.get(framing.suffix) in rules.tokens.eos
        self._rules = rules
        self._framing = framing
        self._parallel = several and not ends_answer
        self._suffix = "" if ends_answer else rules.literal(framing.suffix)
        self._tools = {tool.name: rules.add(self._of_tool(tool)) for tool in tools}

    def answer(self) -> str:
        """Return the rule of an answer that has calls only."""
        return self._section(self._framing.begin)

    def triggers(self) -> Mapping[str, str]:
        """Return the texts that begin a call within free text, each with the rule of what follows."""
        framing = self._framing
        if len(framing.trigger) == 1 or "$name" in framing.trigger:
            # A single bracket does not identify a call; it does with a tool's name behind it.
            begins = {name: framing.begin + framing.prefix_of(name) for name in self._tools}
            return {begin: f"{self._body(name)} {self._more_calls()}" for name, begin in begins.items()}
        trigger = self._leading_token(framing.trigger) or framing.trigger
        return {trigger: self._section(framing.begin, after=trigger)}

    def _leading_token(self, text: str) -> str:
        """Return the longest added token that the text starts with; empty without one."""
        return max(filter(text.startswith, self._rules.tokens.added), key=len, default="")

    def _section(self, begin: str, after: str = "") -> str:
        """Return the rule of calls with their framing, without the part `after` that was already written."""
        first = " | ".join(
            f"{self._literal((begin + self._prefix(name)).removeprefix(after))} {self._body(name)}"
            for name in self._tools
        )
        return self._rules.add(f"({first}) {self._more_calls()}")

    def _more_calls(self) -> str:
        end = self._rules.literal(self._framing.end)
        if not self._parallel:
            return end
        separator = self._rules.literal(self._framing.separator)
        call = self._rules.add(
            " | ".join(f"{self._literal(self._prefix(name))} {self._body(name)}" for name in self._tools)
        )
        return f"({separator} {call})* {end}"

    def _body(self, name: str) -> str:
        return f"{self._tools[name]} {self._suffix}"

    def _prefix(self, name: str) -> str:
        return self._framing.prefix.replace("$name", name)

    def _literal(self, text: str) -> str:
        """Return a literal in which a call's index may be any number."""
        return " /[0-9]{1,4}/ ".join(map(self._rules.literal, _CALL_INDEX.split(text)))

    def _of_tool(self, tool: ToolSpec) -> str:
        """Return the rule of a tool's arguments. Raises BadRequestError that names the tool."""
        try:
            return self._arguments(tool)
        except BadRequestError as error:
            raise type(error)(f"Tool '{tool.name}': {error.message}", param=error.param, code=error.code) from None

    def _arguments(self, tool: ToolSpec) -> str:
        schema = _object_schema(tool)
        if tool.strict:
            check_schema(schema, tool.param, strict=True)
        else:
            check_references(schema, subschemas(schema, tool.param), tool.param)
        if self._framing.style is Style.JSON:
            return _json(schema, tool)
        return self._keys(tool, schema)

    def _keys(self, tool: ToolSpec, schema: dict[str, Any]) -> str:
        """Return the rule of arguments written key by key, in schema order; optional ones may be left out."""
        separator = self._rules.literal(self._framing.key_separator)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise BadRequestError(
                "The parameters are no JSON schema: 'properties' must be an object, and 'required' an array.",
                param=tool.param,
            )
        known: dict[str, frozenset[str]] = {}
        first, rest = "", ""  # rules for what may follow before and after the first argument is written
        for key, inner in reversed(properties.items()):
            excluded = set(self._framing.key_excludes)
            if not _WRITABLE_KEYS[self._framing.style].fullmatch(key) or not excluded.isdisjoint(key):
                raise UnsupportedParameterError(
                    f"The argument {key!r} cannot be written in this model's notation.",
                    param=tool.param,
                )
            name = self._rules.literal(self._framing.key_prefix_of(key))
            argument = self._rules.add(f"{name} {self._value(tool, inner, schema, known)}")
            if key in required:
                first, rest = f"{argument} {rest}", f"{separator} {argument} {rest}"
            else:
                first = f"({argument} {rest} | {first})" if first.strip() else f"({argument} {rest})?"
                rest = f"({separator} {argument})? {rest}"
            first, rest = self._rules.add(first), self._rules.add(rest)
        return first or _EMPTY

    def _value(self, tool: ToolSpec, schema: Any, root: dict[str, Any], known: dict[str, frozenset[str]]) -> str:
        """Return the rule of a value and its end marker. `known` caches the types of references within `root`."""
        framing = self._framing
        inner = schema if isinstance(schema, dict) else {}
        defined: dict[str, Any] = {name: root[name] for name in ("$defs", "definitions") if name in root}

        def in_json() -> str:
            value = _json({**inner, **defined}, tool)
            return f"{self._rules.literal(framing.other_begin)} {value} {self._rules.literal(framing.key_suffix)}"

        if framing.style is Style.PYTHON:  # JSON literals are accepted there, too
            return in_json()
        choices = inner.get("enum", [inner["const"]] if "const" in inner else None)
        if isinstance(choices, list) and choices:
            return f"({' | '.join(map(self._choice, choices))})"
        allowed = json_types(inner, root, known)
        if allowed != UNKNOWN and "string" not in allowed:
            return in_json()
        if framing.string_begin and allowed != STRING:
            return f"({self._string(tool, inner)} | {in_json()})"
        keyword = next(filter(inner.__contains__, _ONLY_IN_JSON), None)
        if keyword is None or not tool.strict or allowed != STRING or isinstance(tool.grammar, Regex):
            return self._string(tool, inner)
        if framing.string_begin:  # a string in JSON is accepted, too
            return in_json()
        raise UnsupportedParameterError(
            f"'{keyword}' of a strict tool's argument cannot be enforced in this model's notation.", param=tool.param
        )

    def _choice(self, value: Any) -> str:
        """Return the rule of one given value and its end marker."""
        framing = self._framing
        if isinstance(value, str):
            text = f"{framing.string_begin}{value}{framing.string_end}{framing.key_suffix}"
        else:
            text = f"{framing.other_begin}{json_text(value, ensure_ascii=False)}{framing.key_suffix}"
        return self._rules.literal(text) or _EMPTY

    def _string(self, tool: ToolSpec, schema: dict[str, Any]) -> str:
        """Return the rule of a string without escapes and its end marker."""
        suffix = self._framing.string_end + self._framing.key_suffix
        begin = self._rules.literal(self._framing.string_begin)
        if isinstance(tool.grammar, Regex):
            pattern = regex_terminal(tool.grammar.pattern)  # separate from the end marker: `$` in it means its end
            text = self._text(
                lambda end: self._rules.terminal(f"{pattern} {lark_string(end)}" if end else pattern), suffix
            )
        else:
            times = _repeats(schema.get("minLength"), schema.get("maxLength"))
            text = self._text(lambda end: f"/(?s:.){times}{escaped(end)}/", suffix)
        return f"{begin} {text}"

    def _text(self, ended: Callable[[str], str], suffix: str) -> str:
        """Return the rule of an unquoted string and its end marker; line breaks around it belong to the notation.

        `ended` returns the terminal of such a string followed by the given text.
        """
        marker = suffix.strip("\n")
        before, _, behind = suffix.partition(marker)
        if marker in self._rules.tokens.added:
            return f"{ended(before)} {self._rules.literal(marker + behind)}"
        text = ended(before + marker)
        if before:
            text += f" & ~/((?s:.)*[^\\n])?{escaped(marker)}(?s:.)*/"
        for other in self._framing.extra_value_ends:
            text += f" & ~/(?s:.)*{escaped(other)}(?s:.)*/"
        return f"{self._rules.add(text, 'lazy')} {self._rules.literal(behind)}"


def with_any_values(tool: ToolSpec) -> ToolSpec:
    """Return a tool with the same arguments, of which every one may have any value."""
    properties, required = tool.parameters.get("properties"), tool.parameters.get("required")
    names = list(properties) if isinstance(properties, dict) else []
    schema = {
        "type": "object",
        "properties": {name: {} for name in names},
        "required": [name for name in required if name in names] if isinstance(required, list) else [],
    }
    return msgspec.structs.replace(tool, parameters=schema)


def _repeats(least: object, most: object) -> str:
    """Return a regex quantifier; bounds that are not numbers are ignored."""
    bounds = [str(each) if isinstance(each, int) and not isinstance(each, bool) else "" for each in (least, most)]
    return f"{{{bounds[0] or 0},{bounds[1]}}}" if any(bounds) else "*"


def _object_schema(tool: ToolSpec) -> dict[str, Any]:
    """Return the schema of a tool's arguments."""
    schema = dict(tool.parameters) or dict(_NO_TOOL)
    if schema.setdefault("type", "object") != "object":
        raise BadRequestError("The parameters must be of 'type' 'object'.", param=tool.param)
    return schema


def _json(schema: dict[str, Any], tool: ToolSpec) -> str:
    """Return the rule of a JSON value; unsupported parts of a schema that is not strict are dropped."""
    text = schema_text(schema, tool.param, strict=tool.strict, lenient=not tool.strict, rust=tool.custom)
    return f"%json {text}"
