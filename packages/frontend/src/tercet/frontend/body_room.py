"""How much memory bodies that are arriving may take together, whoever sends them, or answers that wait to be read."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from tercet.frontend.errors import UnavailableError

_FREE = 65_536
"""Bytes of each body that are not counted: most are shorter, and have room whatever others send."""
_BODIES = 16
"""Bodies of the greatest length that there is room for."""


class BodyRoom:
    """Room for what has come of bodies. The clients of one key have half of it at the most."""

    def __init__(self, longest: int) -> None:
        self.most = _BODIES * longest
        self.taken = 0
        self._owners: Counter[str] = Counter()

    @contextmanager
    def space(self, owner: str) -> Iterator["Space"]:
        """The space of one body, until it is whole or its client is gone."""
        space = Space(self, owner)
        try:
            yield space
        finally:
            if space.taken:
                self._give(owner, space.taken)

    def take(self, owner: str, size: int) -> None:
        """Raises UnavailableError where there is not so much room."""
        if self.taken + size > self.most or (owner and self._owners[owner] + size > self.most // 2):
            raise UnavailableError("Too many long requests are arriving.", code="overloaded", retry_after=1)
        self._add(owner, size)

    def take_alone(self, owner: str, size: int) -> None:
        """The same, but where an owner has nothing yet there is room for anything."""
        if self._owners[owner]:
            self.take(owner, size)
        else:
            self._add(owner, size)

    def _add(self, owner: str, size: int) -> None:
        self.taken += size
        self._owners[owner] += size

    def _give(self, owner: str, size: int) -> None:
        self.taken -= size
        self._owners -= Counter({owner: size})


class Space:
    """What one body takes."""

    def __init__(self, room: BodyRoom, owner: str) -> None:
        self._room = room
        self._owner = owner
        self.taken = 0

    def grow(self, length: int) -> None:
        """The body has so many bytes by now. Raises UnavailableError where there is no room for them."""
        more = length - _FREE - self.taken
        if more > 0:
            self._room.take(self._owner, more)
            self.taken += more

    def fill(self, length: int) -> None:
        """It has so many bytes from the beginning. Raises UnavailableError only where its owner has others.

        One that is longer than all the room would else be refused again and again.
        """
        if (more := length - _FREE) > 0:
            self._room.take_alone(self._owner, more)
            self.taken = more
