"""Custom tools: the model sees a function with one string argument, the client sees the text."""

from collections.abc import Container, Iterable

from tercet.frontend.chat.custom_input import InputDecoder
from tercet.frontend.constraints import Lark, Regex
from tercet.frontend.parsers.events import Event, ToolArgumentsDelta, ToolCallEnd, ToolCallStart
from tercet.frontend.parsers.port import ToolSpec


def custom_tool(name: str, description: str, grammar: Lark | Regex | None = None) -> ToolSpec:
    """Return a custom tool as a function. A regular expression is enforced; a Lark grammar is only described."""
    text, asked = {"type": "string"}, ""
    match grammar:
        case Regex(pattern=pattern):
            text["pattern"] = f"^(?:{pattern})$"
            asked = f"The input has to match this regular expression, in whole:\n{pattern}"
        case Lark(text=definition):
            asked = f"The input has to be a text of the language that this Lark grammar defines:\n{definition}"
    schema = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
    full_description = "\n\n".join(filter(None, (description, asked)))
    param = grammar.param if grammar else "tools"
    return ToolSpec(
        name, schema, full_description, isinstance(grammar, Regex), custom=True, grammar=grammar, param=param
    )


class CustomCalls:
    """Filter that replaces the JSON arguments of calls of the named custom tools by their decoded input."""

    def __init__(self, names: Container[str]) -> None:
        self._names = names
        self._open: tuple[int, InputDecoder] | None = None

    def translate(self, events: Iterable[Event], *, last: bool) -> list[Event]:
        """Translate events; `last` also flushes a call that was cut off."""
        result: list[Event] = []
        for event in events:
            if isinstance(event, ToolArgumentsDelta) and self._open is not None:
                index, decoder = self._open
                result += _delta(index, decoder.feed(event.text))
                continue
            result += self._closed(complete=isinstance(event, ToolCallEnd))
            if isinstance(event, ToolCallStart) and event.name in self._names:
                self._open = event.index, InputDecoder()
                event = ToolCallStart(event.index, event.name, event.id, custom=True)
            result.append(event)
        return result + self._closed(complete=False) if last else result

    def _closed(self, *, complete: bool) -> list[Event]:
        """Flush the input held back of the open call, which has ended or was cut off."""
        if self._open is None:
            return []
        (index, decoder), self._open = self._open, None
        return _delta(index, decoder.finish(complete=complete))


def _delta(index: int, text: str) -> list[Event]:
    return [ToolArgumentsDelta(index, text, custom=True)] if text else []
