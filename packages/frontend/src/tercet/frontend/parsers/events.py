"""Events that parsers emit. The deltas of one kind concatenate to the same text however the input was cut."""

import msgspec


class TextDelta(msgspec.Struct, frozen=True):
    """A piece of the answer's content."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True):
    """A piece of the model's reasoning."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True):
    """The start of a tool call. `index` counts the calls of one answer from 0; `id` is set only if the model wrote one.

    Parsers do not know `custom` tools, whose arguments are plain text: an `OutputParser` sets that field.
    """

    index: int
    name: str
    id: str | None = None
    custom: bool = False


class ToolArgumentsDelta(msgspec.Struct, frozen=True):
    """A piece of a call's arguments: JSON text, or the plain input of a custom tool."""

    index: int
    text: str
    custom: bool = False


class ToolCallEnd(msgspec.Struct, frozen=True):
    """The end of a complete call. A call that the end of the output cuts off has no end event."""

    index: int


Event = TextDelta | ReasoningDelta | ToolCallStart | ToolArgumentsDelta | ToolCallEnd


def join_deltas(events: list[Event]) -> list[Event]:
    """Return the events with neighbouring deltas of one kind joined, in time linear in the text."""
    result: list[Event] = []
    parts: list[str] = []
    for event in events:
        last = result[-1] if result else None
        match event:
            case ToolCallStart() | ToolCallEnd():
                _close(result, parts)
                result.append(event)
                continue
            case TextDelta() | ReasoningDelta():
                same = type(last) is type(event)
            case ToolArgumentsDelta():
                same = isinstance(last, ToolArgumentsDelta) and last.index == event.index
        if not same:
            _close(result, parts)
            result.append(event)
        parts.append(event.text)
    _close(result, parts)
    return result


def _close(result: list[Event], parts: list[str]) -> None:
    """Replace the last delta by one with the gathered text."""
    if not parts:
        return
    match result[-1]:
        case TextDelta():
            result[-1] = TextDelta("".join(parts))
        case ReasoningDelta():
            result[-1] = ReasoningDelta("".join(parts))
        case ToolArgumentsDelta(index, _, custom):
            result[-1] = ToolArgumentsDelta(index, "".join(parts), custom)
        case ToolCallStart() | ToolCallEnd():
            raise AssertionError("a call's start and end have no text to gather")
    parts.clear()
