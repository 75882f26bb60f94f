"""Parsing of one choice: updates to events, and events to a complete message."""

import secrets
import string
from collections.abc import Iterable

import msgspec

from tercet.frontend.chat.custom_calls import CustomCalls
from tercet.frontend.chat.reasoning_tokens import ReasoningTokens
from tercet.frontend.http.loop_turns import Steps, result_of
from tercet.frontend.manager.req_state import Update
from tercet.frontend.model.special_text import SpecialText
from tercet.frontend.parsers.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
    join_deltas,
)
from tercet.frontend.parsers.port import Parser
from tercet.protocol.messages.values import FinishReason, FinishType

_ALPHANUMERIC = string.ascii_letters + string.digits
_EVENTS_PER_STEP = 256


class Call(msgspec.Struct):
    """Tool call; `arguments` is JSON text, or the input of a `custom` tool.

    It may be cut off when the call is not `complete`.
    """

    id: str
    name: str
    arguments: str = ""
    complete: bool = False
    custom: bool = False


class ParsedMessage(msgspec.Struct):
    """Text, reasoning and tool calls of a complete answer."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = []


def merge_events(events: Iterable[Event]) -> ParsedMessage:
    """Merge all events of one choice into a message."""
    return result_of(merge_steps(events))


def merge_steps(events: Iterable[Event]) -> Steps[ParsedMessage]:
    """Merge all events of one choice into a message, in steps."""
    texts: list[str] = []
    thoughts: list[str] = []
    arguments: list[list[str]] = []
    calls: list[Call] = []
    for place, event in enumerate(events):
        if place % _EVENTS_PER_STEP == 0:
            yield
        match event:
            case TextDelta(text):
                texts.append(text)
            case ReasoningDelta(text):
                thoughts.append(text)
            case ToolCallStart(_, name, call_id, custom):
                calls.append(Call(call_id or "", name, custom=custom))
                arguments.append([])
            case ToolArgumentsDelta(index, text):
                arguments[index].append(text)
            case ToolCallEnd(index):
                calls[index].complete = True
    for place, (call, parts) in enumerate(zip(calls, arguments, strict=True)):
        if place % _EVENTS_PER_STEP == 0:
            yield
        call.arguments = "".join(parts)
    return ParsedMessage("".join(texts), "".join(thoughts), calls)


def new_call_id(*, short: bool = False) -> str:
    """Return a new call id; `short` ids are nine letters and digits, which some templates require."""
    if short:
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
    return f"call_{secrets.token_urlsafe(18)}"


class OutputParser:
    """Parser of one choice. Without a notation parser all its text is content.

    `call_end` is the stop token that ends a call, if there is one; the notation parser does not see it.
    """

    def __init__(
        self,
        parser: Parser | None = None,
        specials: SpecialText | None = None,
        thinking: ReasoningTokens | None = None,
        *,
        customs: CustomCalls | None = None,
        call_end: int | None = None,
        one_call: bool = False,
        short_ids: bool = False,
    ) -> None:
        self.calls = 0
        """Number of calls begun so far."""
        self.in_call = False
        """The last call is not complete, and its arguments may be cut off."""
        self._parser = parser
        self._specials = specials
        self._kind: type[Event] = TextDelta
        self._thinking = thinking
        self._customs = customs
        self._call_end = call_end
        self._has_arguments = False
        """The last call has any arguments."""
        self._one_call = one_call
        self._short_ids = short_ids

    @property
    def reasoning_tokens(self) -> int:
        """Return the number of reasoning tokens so far, including their markers."""
        return self._thinking.count if self._thinking else 0

    def read(self, update: Update) -> list[Event]:
        """Return the events of an update; its finish also flushes text held back. Every call has an id."""
        if self._thinking is not None:
            self._thinking.read(update.token_ids)
        if self._parser is None:
            return [TextDelta(update.text)] if update.text else []
        events = self._parser.feed(update.text) if update.text else []
        if update.finish is not None:
            stopped = update.finish.type is FinishType.STOP and not isinstance(update.finish.matched, str)
            events += self._parser.finish(cut=not stopped)
        if self._specials is not None:
            events = self._without_specials(self._specials, events)
            if update.finish is not None:
                events += self._held_back(self._specials)
        shown = [event for event in map(self._shown, events) if event is not None]
        if update.finish is not None:
            shown += self._end_of_call(update.finish)
        if self._customs is not None:
            shown = self._customs.translate(shown, last=update.finish is not None)
        return join_deltas(shown)

    def _end_of_call(self, finish: FinishReason) -> list[Event]:
        """Complete the open call if the answer stopped at its end token."""
        stopped = finish.type is FinishType.STOP and finish.matched is not None and finish.matched == self._call_end
        if not (stopped and self.in_call):
            return []
        self.in_call, index = False, self.calls - 1
        nothing: list[Event] = [] if self._has_arguments else [ToolArgumentsDelta(index, "{}")]
        return [*nothing, ToolCallEnd(index)]

    def _without_specials(self, specials: SpecialText, events: list[Event]) -> list[Event]:
        result: list[Event] = []
        for event in events:
            if type(event) is not self._kind:
                result += self._held_back(specials)
                self._kind = type(event)
            match event:
                case TextDelta(text):
                    event = TextDelta(specials.feed(text))
                case ReasoningDelta(text):
                    event = ReasoningDelta(specials.feed(text))
            result.append(event)
        return result

    def _held_back(self, specials: SpecialText) -> list[Event]:
        """Flush text that looked like the beginning of a special token."""
        held = specials.finish()
        return [ReasoningDelta(held) if self._kind is ReasoningDelta else TextDelta(held)]

    def _shown(self, event: Event) -> Event | None:
        """Return the event for the client; None if it is hidden."""
        match event:
            case TextDelta("") | ReasoningDelta(""):
                return None
            case TextDelta() | ReasoningDelta():
                return event
            case _ if self._one_call and event.index > 0:
                return None
            case ToolCallStart(index, name, call_id):
                self.calls += 1
                self.in_call, self._has_arguments = True, False
                return ToolCallStart(index, name, call_id or new_call_id(short=self._short_ids))
            case ToolCallEnd():
                self.in_call = False
                return event
            case ToolArgumentsDelta():
                self._has_arguments = True
                return event
