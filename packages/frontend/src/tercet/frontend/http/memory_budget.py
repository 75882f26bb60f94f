"""Memory budgets for request bodies and for unread responses, shared by all callers."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from tercet.frontend.errors import UnavailableError

_FREE = 65_536
"""Bytes of each body that are free: most bodies are shorter, so they are accepted under any load."""
_BODIES = 16
"""Number of bodies of maximum length that the budget holds."""
_VALUE = 64
"""Bytes of a parsed value in addition to its text: an int or a short string, and its entry in a list or an object."""
_OBJECT = 512
"""Bytes of a parsed object in addition to its members."""
_WIDE = 4
"""Bytes per character of a string that has a character outside the Basic Multilingual Plane."""
_kept: ContextVar["list[Space]"] = ContextVar("kept spaces")


@contextmanager
def until_request_ends() -> Iterator[None]:
    """Hold the reservations of bodies read inside until the end, since the parsed values live as long."""
    spaces: list[Space] = []
    token = _kept.set(spaces)
    try:
        yield
    finally:
        _kept.reset(token)
        for space in spaces:
            space.give_back()


class MemoryBudget:
    """Memory budget in bytes. One API key gets at most half of it, except for a body that is its only one."""

    def __init__(self, longest: int) -> None:
        self.most = _BODIES * longest
        self.taken = 0
        self._owners: Counter[str] = Counter()

    @contextmanager
    def space(self, owner: str) -> Iterator["Space"]:
        """Yield the reservation for one body.

        It is released at once if the body does not arrive in whole, otherwise at the end of the request.
        """
        space = Space(self, owner)
        try:
            yield space
        except BaseException:
            space.give_back()
            raise
        if (kept := _kept.get(None)) is None:
            space.give_back()
        else:
            kept.append(space)

    def take(self, owner: str, size: int, *, own: int = 0) -> None:
        """Reserve `size` more bytes for a body that has `own` bytes already.

        Raises UnavailableError if the budget is exhausted.
        """
        others, owners = self.taken - own, self._owners[owner] - own
        if (others and self.taken + size > self.most) or (
            owner and owners and self._owners[owner] + size > self.most // 2
        ):
            raise UnavailableError("Too many long requests are in flight.", code="overloaded", retry_after=1)
        self._add(owner, size)

    def take_alone(self, owner: str, size: int) -> None:
        """Reserve `size` bytes; any size is accepted for an owner that has no other reservation."""
        if self._owners[owner]:
            self.take(owner, size)
        else:
            self._add(owner, size)

    def give(self, owner: str, size: int) -> None:
        """Release `size` bytes of an owner."""
        self.taken -= size
        self._owners -= Counter({owner: size})

    def _add(self, owner: str, size: int) -> None:
        self.taken += size
        self._owners[owner] += size


class Space:
    """The memory that one body reserves."""

    def __init__(self, room: MemoryBudget, owner: str) -> None:
        self._room = room
        self._owner = owner
        self._bytes = self._values = self._objects = 0
        self._wide = False
        self.taken = 0

    def read(self, piece: bytes | bytearray | memoryview) -> None:
        """Reserve memory for one more piece of a body and for the values parsed from it. Raises UnavailableError.

        Every value except the first follows a comma or a colon. One character of four bytes makes its whole string four
        bytes wide, and it may be written as an escape.
        """
        piece = bytes(piece)
        self._bytes += len(piece)
        self._values += piece.count(b",") + piece.count(b":")
        self._objects += piece.count(b"{")
        self._wide = self._wide or not piece.isascii() or b"\\u" in piece
        text = self._bytes * (_WIDE if self._wide else 1)
        self.grow(text + _VALUE * self._values + _OBJECT * self._objects)

    def grow(self, length: int) -> None:
        """Extend the reservation to `length` bytes. Raises UnavailableError."""
        more = length - _FREE - self.taken
        if more > 0:
            self._room.take(self._owner, more, own=self.taken)
            self.taken += more

    def fill(self, length: int) -> None:
        """Reserve `length` bytes at the start. Raises UnavailableError only if the owner has other reservations.

        A body larger than the whole budget would otherwise be refused again and again.
        """
        if (more := length - _FREE) > 0:
            self._room.take_alone(self._owner, more)
            self.taken = more

    def give_back(self) -> None:
        if self.taken:
            self._room.give(self._owner, self.taken)
            self.taken = 0
