"""The port: what a parser is, and what each notation of tool calls says about itself."""

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
    """Reads one choice's text as it arrives. Never raises for anything a model writes."""

    def feed(self, text: str) -> list[Event]:
        """What is certain with this text."""
        ...

    def finish(self) -> list[Event]:
        """What was held back, once, when no more text comes."""
        ...


class ToolSpec(msgspec.Struct, frozen=True):
    """A tool the model may call, and the JSON schema of its arguments."""

    name: str
    parameters: Schema = {}
    description: str = ""
    strict: bool = False
    """Calls keep to the schema, whatever the model."""
    custom: bool = False
    """A custom tool: its one argument is the `input` that the client gets, as a text."""
    grammar: Lark | Regex | None = None
    """What its input is to keep to."""


class Tools:
    """The tools of one request. None at all means that nothing is known about them."""

    def __init__(self, specs: Iterable[ToolSpec] = ()) -> None:
        self._schemas: dict[str, Schema] = {}
        self._texts: set[str] = set()
        for spec in specs:
            self._schemas[spec.name] = spec.parameters
            if spec.custom:
                self._texts.add(spec.name)

    def admits(self, name: str) -> bool:
        """Whether a call in unmarked text may have this name."""
        return not self._schemas or name in self._schemas

    def schema(self, name: str) -> Schema:
        """The schema of a tool's arguments; empty when unknown."""
        return self._schemas.get(name, {})

    def takes_text(self, name: str) -> bool:
        """Whether arguments of a tool may be any text: a custom tool's, which some models write as it is."""
        return name in self._texts


class Style(StrEnum):
    """How arguments are written."""

    JSON = "json"
    """One JSON object."""
    TAGGED = "tagged"
    """Key by key between tags; strings as they are, other values as JSON."""
    PYTHON = "python"
    """Keyword arguments of a Python call."""


class ToolFraming(msgspec.Struct, frozen=True, kw_only=True):
    """How calls are written, exactly: what a grammar for required, named or strict calls is made of.

    An answer with calls is `begin`, then the calls with `separator` between them, then `end`. A call is `prefix`,
    its arguments in `style`, and `suffix`; an argument that is not part of one JSON object is `key_prefix`, the value
    and `key_suffix`, with `key_separator` between. `$name`, `$index` (the call's) and `$key` stand for themselves.
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
    value_also_ends: tuple[str, ...] = ()
    """Texts that end a value although its suffix is missing: no value has them within."""
    trigger: str
    """When this appears in free text a call follows: where a structural tag begins."""
    also_begins: tuple[str, ...] = ()
    """Regular expressions, or markers, of what else the grammar takes for the beginning of a call."""
    special_tokens: bool = False
    """Some markers are special tokens of the vocabulary: decode with `skip_special_tokens` off."""
    short_ids: bool = False
    """The chat template takes call ids of exactly nine letters and digits."""

    def prefix_of(self, name: str, index: int = 0) -> str:
        """What comes before the arguments of one call."""
        return self.prefix.replace("$name", name).replace("$index", str(index))

    def key_prefix_of(self, key: str) -> str:
        """What comes before the value of one argument."""
        return self.key_prefix.replace("$key", key)


Grammar = Callable[[Reader, Sink, Tools], Steps[None]]


class ToolFormat(msgspec.Struct, frozen=True, kw_only=True):
    """One notation of tool calls: how it is written and how it is read."""

    framing: ToolFraming
    grammar: Grammar
    reasons: bool = False
    """It sets reasoning apart itself: no reasoning parser goes before it."""


class ReasoningFraming(msgspec.Struct, frozen=True, kw_only=True):
    """How reasoning is written: what tells its tokens from others, and what a grammar for what follows begins with."""

    begin: str
    end: str
    also_ends: tuple[str, ...] = ()
    """Markers that end reasoning although its end marker is missing, and belong to what follows."""
    repeats: bool = False
    """It may begin anywhere, and again; otherwise only an answer's first words begin it."""
    turn: str = ""
    """What stands between reasoning and what follows it, as a message of its own."""
    answer: str = ""
    """What stands before an answer that is no call."""


class ReasoningFormat(msgspec.Struct, frozen=True, kw_only=True):
    """One notation of reasoning. `parser` takes the end of the rendered prompt, which may have opened it already."""

    framing: ReasoningFraming
    parser: Callable[[str], Parser]
    opened: Callable[[str], bool]
    """Whether an answer to a prompt with this end begins within reasoning."""
    closed: Callable[[str], bool]
    """Whether it begins after reasoning, which it then has none of."""
    special_tokens: bool = False
    """As in `ToolFraming`."""
