"""Event buffer that grammars write to."""

from tercet.frontend.parsers.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
    join_deltas,
)


class Sink:
    """Event buffer of one choice. White space alone before, between or after calls is framing and is dropped."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._index = -1
        self._blank: list[str] | None = []
        """White space that may turn out to be framing; None while content is emitted."""
        self.open = False
        """A call has started and not ended."""

    def text(self, text: str) -> None:
        """Add content."""
        if self._blank is not None:
            if not text or text.isspace():
                self._blank.append(text)
                return
            text = "".join(self._blank) + text
            self._blank = None
        self._put(TextDelta(text))

    def reasoning(self, text: str) -> None:
        """Add reasoning."""
        self._put(ReasoningDelta(text))

    def start(self, name: str, call_id: str | None = None) -> None:
        """Start a call."""
        self._index += 1
        self._blank = []
        self.open = True
        self._events.append(ToolCallStart(self._index, name, call_id))

    def arguments(self, text: str) -> None:
        """Add JSON text to the arguments of the open call."""
        self._put(ToolArgumentsDelta(self._index, text))

    def end(self) -> None:
        """End the open call."""
        self.open = False
        self._events.append(ToolCallEnd(self._index))

    def finish(self) -> None:
        """End the text. White space counts as text if there was no call."""
        if self._blank and self._index < 0:
            self._put(TextDelta("".join(self._blank)))
        self._blank = None

    def drain(self) -> list[Event]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return join_deltas(events)

    def _put(self, delta: TextDelta | ReasoningDelta | ToolArgumentsDelta) -> None:
        if delta.text:
            self._events.append(delta)
