"""Reader for text that arrives in pieces: grammars are generators that yield when they need more of it.

A grammar is thus written from top to bottom, and its position in the code is its state. Its decisions depend on the
characters alone, never on where the pieces were cut. Every character is consumed once, so reading is linear.
"""

import re
from collections.abc import Callable, Generator
from typing import Self, TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
Emit = Callable[[str], None]

MAX_HELD_CHARS = 262_144
"""Characters held back before they are known to be a call. A longer text is emitted as text."""
MAX_NAME_CHARS = 256
_MIN_MARKUP_CHARS = 3
"""Characters that identify an unfinished marker at the end of an output that was cut off."""

_SPACES = re.compile(r"\s+")
_ANYTHING = re.compile(r"[\s\S]+")


class MalformedError(Exception):
    """The text does not follow the notation. The grammar that began the attempt catches it."""


class Markers:
    """Literals to search for together. None may begin with another; if one ends with another, the longer wins."""

    def __init__(self, *literals: str) -> None:
        for literal in literals:
            if any(literal != other and other in literal and not literal.endswith(other) for other in literals):
                raise ValueError(f"{literal!r} contains another marker")
        self._literals = literals
        self._firsts = frozenset(literal[0] for literal in literals)
        self._reach = max(map(len, literals)) - 1
        self.search = re.compile("|".join(map(re.escape, literals))).search

    @classmethod
    def with_breaks(cls, *literals: str) -> Self:
        """Return these markers with and without a line break before them, which belongs to the marker."""
        return cls(*(f"\n{literal}" for literal in literals), *literals)

    def partial_marker(self, text: str, start: int) -> int:
        """Return where, from `start`, a marker may begin at the end of `text`; the length of `text` if none can."""
        for at in range(max(start, len(text) - self._reach), len(text)):
            if text[at] in self._firsts and any(literal.startswith(text[at:]) for literal in self._literals):
                return at
        return len(text)


class Reader:
    """Buffer of unconsumed text, and of the text consumed since `hold`, which may still be emitted as text."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._cut = False
        self._held: list[str] | None = None
        self._room = 0
        self._sign: str | None = None

    def push(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self, *, cut: bool = False) -> None:
        """Announce the end of the text. `cut` means that the model did not end it itself."""
        self._ended, self._cut = True, cut

    @property
    def exhausted(self) -> bool:
        return self._at >= len(self._text)

    def hold(self, begun: str = "", limit: int = MAX_HELD_CHARS, *, sign: str | None = None) -> None:
        """Keep the text consumed from here on, after `begun`; more than `limit` characters raise MalformedError.

        If a cut ends the output here, the text is an unfinished call and is dropped. Where calls have no marker, `sign`
        is the beginning of one: only a part of it is dropped, until `announce` is called.
        """
        self._held = [begun]
        self._room = limit - len(begun)
        self._sign = sign

    def announce(self) -> None:
        """Declare that the held text can only be the beginning of a call."""
        self._sign = None

    def commit(self) -> None:
        """Drop the held text, because it was understood."""
        self._held = None

    def release(self) -> str:
        """Return the held text, which was not understood, as it was written; nothing if a cut left it unfinished."""
        held, self._held = self._held or [], None
        text = "".join(held)
        unfinished = self._sign is None or (len(text) >= _MIN_MARKUP_CHARS and self._sign.startswith(text))
        return "" if self._cut and self.exhausted and unfinished else text

    def cut_within(self, *literals: str) -> bool:
        """Return whether a cut ended the output within one of these literals; then the part of it is consumed."""
        rest = self._text[self._at :]
        if not (self._cut and len(rest) >= _MIN_MARKUP_CHARS and any(each.startswith(rest) for each in literals)):
            return False
        self._consume(len(self._text))
        return True

    def _consume(self, stop: int) -> str:
        at, self._at = self._at, stop
        if self._held is not None:
            if stop - at > self._room:
                self._at = at + self._room
                self._held.append(self._text[at : self._at])
                raise MalformedError
            self._held.append(self._text[at:stop])
            self._room -= stop - at
        return self._text[at:stop]

    def next_char(self) -> str:
        """Consume and return the character that `peek` has shown."""
        return self._consume(self._at + 1)

    def peek(self) -> Steps[str]:
        """Return the next character without consuming it; empty at the end."""
        while self._at >= len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def accept(self, literal: str) -> Steps[bool]:
        """Consume `literal` if it is next, and return whether it was. If a cut ends the output in it, drop the part."""
        while True:
            here = self._text[self._at : self._at + len(literal)]
            if here == literal:
                self._consume(self._at + len(literal))
                return True
            if not literal.startswith(here):
                return False
            if self._ended:
                if self._cut and (self._held is None or self._sign is None):
                    self._consume(len(self._text))
                return False
            yield

    def accept_any(self, *literals: str) -> Steps[str]:
        """Consume and return the literal that is next; empty if none is."""
        char = yield from self.peek()
        for literal in literals:
            if literal.startswith(char) and (yield from self.accept(literal)):
                return literal
        return ""

    def expect(self, literal: str) -> Steps[None]:
        """Consume `literal`. Raises MalformedError if it is not next."""
        if not (yield from self.accept(literal)):
            raise MalformedError

    def stream(self, run: re.Pattern[str], emit: Emit, limit: int | None = None) -> Steps[None]:
        """Consume and emit characters while they match `run`, one repeated class of characters.

        Raises MalformedError, after `limit` of them, where one more would match.
        """
        room = limit
        while True:
            if found := run.match(self._text, self._at):
                stop = found.end() if room is None else min(found.end(), self._at + room)
                if room is not None:
                    room -= stop - self._at
                if stop > self._at:
                    emit(self._consume(stop))
                if stop < found.end():
                    raise MalformedError
            if self._ended or self._at < len(self._text):
                return
            yield

    def rest(self, emit: Emit) -> Steps[None]:
        """Consume and emit all text up to the end of the output."""
        yield from self.stream(_ANYTHING, emit)

    def run(self, run: re.Pattern[str], limit: int | None = MAX_NAME_CHARS) -> Steps[str]:
        """Consume characters while they match `run`. Raises MalformedError for more than `limit`."""
        parts: list[str] = []
        yield from self.stream(run, parts.append, limit)
        return "".join(parts)

    def spaces(self) -> Steps[str]:
        """Consume white space."""
        return (yield from self.run(_SPACES, None))

    def peek_solid(self) -> Steps[str]:
        """Consume white space and return the character after it, unconsumed; empty at the end."""
        yield from self.spaces()
        return (yield from self.peek())

    def until(self, markers: Markers, emit: Emit) -> Steps[str]:
        """Consume and emit the text before the first marker, then consume and return the marker; empty at the end."""
        marker = yield from self.find(markers, emit)
        self._consume(self._at + len(marker))
        return marker

    def find(self, markers: Markers, emit: Emit) -> Steps[str]:
        """Consume and emit the text before the first marker, and return the marker unconsumed; empty at the end."""
        while True:
            if found := markers.search(self._text, self._at):
                emit(self._consume(found.start()))
                return found.group()
            stop = markers.partial_marker(self._text, self._at)
            if self._ended and not (self._cut and len(self._text[stop:].lstrip("\n")) >= _MIN_MARKUP_CHARS):
                stop = len(self._text)
            if stop > self._at:
                emit(self._consume(stop))
            if self._ended:
                self._at = len(self._text)
                return ""
            yield
