"""How much memory the bodies of requests may take together, whoever sends them, or answers that wait to be read."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from tercet.frontend.errors import UnavailableError

_FREE = 65_536
"""Bytes of each body that are not counted: most are shorter, and have room whatever others send."""
_BODIES = 16
"""Bodies of the greatest length that there is room for."""
_VALUE = 64
"""Bytes that a parsed value takes besides its text: an int or a short text, and its place in a list or an object."""
_OBJECT = 512
"""Bytes that a parsed object takes besides."""
_WIDE = 4
"""Bytes of a character of a text that has one outside the Basic Multilingual Plane."""
_kept: ContextVar["list[Space]"] = ContextVar("kept spaces")


@contextmanager
def until_request_ends() -> Iterator[None]:
    """Keep the spaces of the bodies that are read inside until the end: what is parsed of them is held as long."""
    spaces: list[Space] = []
    token = _kept.set(spaces)
    try:
        yield
    finally:
        _kept.reset(token)
        for space in spaces:
            space.give_back()


class MemoryBudget:
    """Room for bodies. The clients of one key have half of it at the most, but for a body that is their only one."""

    def __init__(self, longest: int) -> None:
        self.most = _BODIES * longest
        self.taken = 0
        self._owners: Counter[str] = Counter()

    @contextmanager
    def space(self, owner: str) -> Iterator["Space"]:
        """Yield the space of one body.

        It is given back if its client leaves before it is whole, and otherwise at the end of its request.
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
        """Take `size` bytes more for what has `own`. Raises UnavailableError where there is not so much room."""
        others, owners = self.taken - own, self._owners[owner] - own
        if (others and self.taken + size > self.most) or (
            owner and owners and self._owners[owner] + size > self.most // 2
        ):
            raise UnavailableError("Too many long requests are in flight.", code="overloaded", retry_after=1)
        self._add(owner, size)

    def take_alone(self, owner: str, size: int) -> None:
        """Do the same, but where an owner has nothing yet there is room for anything."""
        if self._owners[owner]:
            self.take(owner, size)
        else:
            self._add(owner, size)

    def give(self, owner: str, size: int) -> None:
        """Take back what an owner has taken."""
        self.taken -= size
        self._owners -= Counter({owner: size})

    def _add(self, owner: str, size: int) -> None:
        self.taken += size
        self._owners[owner] += size


class Space:
    """The memory that one body takes."""

    def __init__(self, room: MemoryBudget, owner: str) -> None:
        self._room = room
        self._owner = owner
        self._bytes = self._values = self._objects = 0
        self._wide = False
        self.taken = 0

    def read(self, piece: bytes | bytearray | memoryview) -> None:
        """Count one more piece of a body, and what will be parsed of it. Raises UnavailableError where it has no room.

        Every value but the first stands behind a comma or a colon. One character of four bytes makes all of its text as
        wide, and may be written as an escape.
        """
        piece = bytes(piece)
        self._bytes += len(piece)
        self._values += piece.count(b",") + piece.count(b":")
        self._objects += piece.count(b"{")
        self._wide = self._wide or not piece.isascii() or b"\\u" in piece
        text = self._bytes * (_WIDE if self._wide else 1)
        self.grow(text + _VALUE * self._values + _OBJECT * self._objects)

    def grow(self, length: int) -> None:
        """Take room for so many bytes in all. Raises UnavailableError where there is none."""
        more = length - _FREE - self.taken
        if more > 0:
            self._room.take(self._owner, more, own=self.taken)
            self.taken += more

    def fill(self, length: int) -> None:
        """It has so many bytes from the beginning. Raises UnavailableError only where its owner has others.

        One that is longer than all the room would else be refused again and again.
        """
        if (more := length - _FREE) > 0:
            self._room.take_alone(self._owner, more)
            self.taken = more

    def give_back(self) -> None:
        """Give all of it back."""
        if self.taken:
            self._room.give(self._owner, self.taken)
            self.taken = 0
