"""What parsers find in a model's text. Deltas of one kind add up to the whole, however the text was cut."""

import msgspec


class TextDelta(msgspec.Struct, frozen=True):
    """More of what the model says to the reader."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True):
    """More of what the model thinks."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True):
    """The model calls a tool; `index` counts the calls of one answer from 0. `id` only where the model wrote one.

    Parsers know no `custom` tools, which have a text for arguments: a `OutputParser` tells them apart.
    """

    index: int
    name: str
    id: str | None = None
    custom: bool = False


class ToolArgumentsDelta(msgspec.Struct, frozen=True):
    """More of a call's arguments, as JSON text, or of a custom tool's input, as it is."""

    index: int
    text: str
    custom: bool = False


class ToolCallEnd(msgspec.Struct, frozen=True):
    """The call is complete. A call that the end of the output cut off has no end, and its arguments may be cut too."""

    index: int


Event = TextDelta | ReasoningDelta | ToolCallStart | ToolArgumentsDelta | ToolCallEnd


def merged(events: list[Event]) -> list[Event]:
    """The same with neighbouring deltas of one kind as one. Linear in the text."""
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
    """Give the last delta the text gathered for it."""
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
