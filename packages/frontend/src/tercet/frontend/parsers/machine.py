"""Parsers built from grammars: `Machine` runs one grammar, `Chain` feeds the text of a first parser to a second."""

from collections.abc import Callable

from tercet.frontend.parsers.events import Event, TextDelta, join_deltas
from tercet.frontend.parsers.port import Parser
from tercet.frontend.parsers.reader import Reader, Steps
from tercet.frontend.parsers.sink import Sink


class Machine:
    """Parser that runs one grammar over one choice's text."""

    def __init__(self, grammar: Callable[[Reader, Sink], Steps[None]]) -> None:
        self._reader = Reader()
        self._sink = Sink()
        self._steps = grammar(self._reader, self._sink)

    def feed(self, text: str) -> list[Event]:
        self._reader.push(text)
        next(self._steps, None)
        return self._sink.drain()

    def finish(self, *, cut: bool = False) -> list[Event]:
        self._reader.end(cut=cut)
        for _ in self._steps:
            raise AssertionError("a grammar asked for more text after the end")
        self._sink.finish()
        return self._sink.drain()


class Chain:
    """Two parsers in sequence: the second reads the text events of the first."""

    def __init__(self, first: Parser, second: Parser) -> None:
        self._first = first
        self._second = second

    def feed(self, text: str) -> list[Event]:
        return join_deltas(self._through(self._first.feed(text)))

    def finish(self, *, cut: bool = False) -> list[Event]:
        return join_deltas(self._through(self._first.finish(cut=cut)) + self._second.finish(cut=cut))

    def _through(self, events: list[Event]) -> list[Event]:
        result: list[Event] = []
        for event in events:
            result += self._second.feed(event.text) if isinstance(event, TextDelta) else [event]
        return result
