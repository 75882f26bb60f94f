"""The parser port, and the description that each notation of tool calls and reasoning gives of itself."""

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Protocol

import msgspec

from tercet.frontend.constraints import Lark, Regex
from tercet.frontend.parsers.events import Event
from tercet.frontend.parsers.reader import Reader, Steps
from tercet.frontend.parsers.sink import Sink

Schema = Mapping[str, object]


class Parser(Protocol):
    """Incremental parser of one choice's text. It never raises for the text of a model."""

    def feed(self, text: str) -> list[Event]:
        """Return the events that are certain after this text."""
        ...

    def finish(self, *, cut: bool = False) -> list[Event]:
        """Return the events that were held back. Call it once, when no more text comes.

        `cut` means that the model did not end the text itself: an unfinished marker or head of a call is dropped.
        """
        ...


class ToolSpec(msgspec.Struct, frozen=True):
    """A tool that the model may call, with the JSON schema of its arguments."""

    name: str
    parameters: Schema = {}
    description: str = ""
    strict: bool = False
    """Calls must match the schema, for every model."""
    custom: bool = False
    """A custom tool: its only argument is the plain text `input` that the client receives."""
    grammar: Lark | Regex | None = None
    """Constraint on a custom tool's input."""
    param: str = "tools"
    """Parameter of the client that holds the schema, for errors."""


class Tools:
    """The tools of one request. An empty set means that the tools are unknown."""

    def __init__(self, specs: Iterable[ToolSpec] = ()) -> None:
        self._schemas: dict[str, Schema] = {}
        self._texts: set[str] = set()
        for spec in specs:
            self._schemas[spec.name] = spec.parameters
            if spec.custom:
                self._texts.add(spec.name)

    def admits(self, name: str) -> bool:
        """Return whether a call in unmarked text may have this name."""
        return not self._schemas or name in self._schemas

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the known tools, longer ones first."""
        return tuple(sorted(self._schemas, key=len, reverse=True))

    def begins(self, text: str) -> bool:
        """Return whether a known tool's name begins with this text, which is not empty."""
        return bool(text) and any(name.startswith(text) for name in self._schemas)

    def schema(self, name: str) -> Schema:
        """Return the schema of a tool's arguments; empty if unknown."""
        return self._schemas.get(name, {})

    def is_custom(self, name: str) -> bool:
        """Return whether a tool is custom: some models write its text argument without JSON."""
        return name in self._texts


class Style(StrEnum):
    """Notation of a call's arguments."""

    JSON = "json"
    TAGGED = "tagged"
    """One key at a time between tags; strings are not escaped, other values are JSON."""
    PYTHON = "python"


class ToolFraming(msgspec.Struct, frozen=True, kw_only=True):
    """Exact notation of calls, from which grammars for required, named and strict calls are built.

    An answer with calls is `begin`, then the calls with `separator` between them, then `end`. A call is `prefix`,
    its arguments in `style`, and `suffix`. An argument that is not part of one JSON object is `key_prefix`, the value
    and `key_suffix`, with `key_separator` between. `$name`, `$index` (of the call) and `$key` are placeholders.
    """

    begin: str = ""
    prefix: str
    suffix: str
    separator: str = ""
    end: str = ""
    style: Style = Style.JSON
    key_prefix: str = ""
    key_suffix: str = ""
    key_separator: str = ""
    string_begin: str = ""
    string_end: str = ""
    """Marks around a string between tags. Without marks, the schema alone says that a value is a string."""
    other_begin: str = ""
    """Mark before any other value."""
    key_excludes: str = ""
    """Characters that no key may contain, besides line breaks and angle brackets."""
    extra_value_ends: tuple[str, ...] = ()
    """Texts that also end a value if its suffix is missing. A value never contains them."""
    trigger: str
    """Text that starts a call within free text: the trigger of a structural tag. It may contain `$name`."""
    line_start: bool = False
    """A call begins at the start of a line only."""
    extra_begins: tuple[str, ...] = ()
    """Markers that the grammar also reads as the beginning of a call."""
    extra_patterns: tuple[str, ...] = ()
    """Regular expressions for texts that the grammar also reads as the beginning of a call."""
    special_tokens: bool = False
    """Some markers are special tokens of the vocabulary, so decoding needs `skip_special_tokens=False`."""
    short_ids: bool = False
    """The chat template accepts only call ids of exactly nine letters and digits."""

    def prefix_of(self, name: str, index: int = 0) -> str:
        """Return the text before the arguments of one call."""
        return self.prefix.replace("$name", name).replace("$index", str(index))

    def key_prefix_of(self, key: str) -> str:
        """Return the text before the value of one argument."""
        return self.key_prefix.replace("$key", key)


Grammar = Callable[[Reader, Sink, Tools], Steps[None]]


class ToolFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Notation of tool calls: its framing and the grammar that reads it."""

    framing: ToolFraming
    grammar: Grammar
    parses_reasoning: bool = False
    """The notation separates reasoning itself, so no reasoning parser runs before it."""


class ReasoningFraming(msgspec.Struct, frozen=True, kw_only=True):
    """Exact notation of reasoning: markers that delimit it, and the text that a grammar for the answer begins with."""

    begin: str
    end: str
    extra_ends: tuple[str, ...] = ()
    """Markers that end reasoning if its end marker is missing. They belong to the text after it."""
    repeats: bool = False
    """Reasoning may begin anywhere and more than once; otherwise only at the start of an answer."""
    turn: str = ""
    """Text between reasoning and the message that follows it."""
    answer: str = ""
    """Text before an answer that is not a call."""


class ReasoningFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Notation of reasoning. `parser` takes the end of the rendered prompt, which may have opened the reasoning."""

    framing: ReasoningFraming
    parser: Callable[[str], Parser]
    opened: Callable[[str], bool]
    """Return whether an answer to a prompt with this end begins inside reasoning."""
    closed: Callable[[str], bool]
    """Return whether the prompt has closed the reasoning, so that the answer has none."""
    special_tokens: bool = False
    """See `ToolFraming.special_tokens`."""
