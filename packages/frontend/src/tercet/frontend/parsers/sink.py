"""Where grammars put what they find."""

from tercet.frontend.parsers.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
    merged,
)


class Sink:
    """Gathers events. White space alone before the first call, between two or after the last is framing, not text."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._index = -1
        self._blank: list[str] | None = []
        """White space that may turn out to be framing; None while text is being said."""
        self.open = False
        """A call has begun and not ended."""

    def text(self, text: str) -> None:
        """Words for the reader."""
        if self._blank is not None:
            if not text or text.isspace():
                self._blank.append(text)
                return
            text = "".join(self._blank) + text
            self._blank = None
        self._put(TextDelta(text))

    def reasoning(self, text: str) -> None:
        """Thoughts."""
        self._put(ReasoningDelta(text))

    def start(self, name: str, call_id: str | None = None) -> None:
        """A call."""
        self._index += 1
        self._blank = []
        self.open = True
        self._events.append(ToolCallStart(self._index, name, call_id))

    def arguments(self, text: str) -> None:
        """More JSON text of the call that is open."""
        self._put(ToolArgumentsDelta(self._index, text))

    def end(self) -> None:
        """The open call is complete."""
        self.open = False
        self._events.append(ToolCallEnd(self._index))

    def finish(self) -> None:
        """The text is over: without calls its white space counts."""
        if self._blank and self._index < 0:
            self._put(TextDelta("".join(self._blank)))
        self._blank = None

    def drain(self) -> list[Event]:
        """What was found since the last time."""
        events, self._events = self._events, []
        return merged(events)

    def _put(self, delta: TextDelta | ReasoningDelta | ToolArgumentsDelta) -> None:
        if delta.text:
            self._events.append(delta)
