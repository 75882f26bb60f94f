"""Memory budgets for request bodies and for unread responses, shared by all callers."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from tercet.frontend.errors import UnavailableError

_FREE_BYTES = 65_536
"""Bytes of each body that are free: most bodies are shorter, so they are accepted under any load."""
_MAX_LONG_BODIES = 16
"""Number of bodies of maximum length that the budget holds."""
_VALUE_BYTES = 64
"""Bytes of a parsed value in addition to its text: an int or a short string, and its entry in a list or an object."""
_OBJECT_BYTES = 512
"""Bytes of a parsed object in addition to its members."""
_WIDE_CHARACTER = 4
"""Bytes per character of a string that has a character outside the Basic Multilingual Plane."""
_held: ContextVar["list[Reservation]"] = ContextVar("held reservations")


@contextmanager
def hold_reservations() -> Iterator[None]:
    """Hold the reservations of bodies read inside until the end, since the parsed values live as long."""
    reservations: list[Reservation] = []
    token = _held.set(reservations)
    try:
        yield
    finally:
        _held.reset(token)
        for reservation in reservations:
            reservation.release_all()


class MemoryBudget:
    """Memory budget in bytes. One API key gets at most half of it, except for a body that is its only one."""

    def __init__(self, longest: int) -> None:
        self.limit = _MAX_LONG_BODIES * longest
        self.used = 0
        self._owners: Counter[str] = Counter()

    @contextmanager
    def reserve(self, owner: str) -> Iterator["Reservation"]:
        """Yield the reservation for one body.

        It is released at once if the body does not arrive in whole, otherwise at the end of the request.
        """
        reservation = Reservation(self, owner)
        try:
            yield reservation
        except BaseException:
            reservation.release_all()
            raise
        if (held := _held.get(None)) is None:
            reservation.release_all()
        else:
            held.append(reservation)

    def acquire(self, owner: str, size: int, *, own: int = 0) -> None:
        """Reserve `size` more bytes for a body that has `own` bytes already.

        Raises UnavailableError if the budget is exhausted.
        """
        others, owners = self.used - own, self._owners[owner] - own
        if (others and self.used + size > self.limit) or (
            owner and owners and self._owners[owner] + size > self.limit // 2
        ):
            raise UnavailableError("Too many long requests are in flight.", code="overloaded", retry_after=1)
        self._add(owner, size)

    def acquire_any_if_alone(self, owner: str, size: int) -> None:
        """Reserve `size` bytes; any size is accepted for an owner that has no other reservation."""
        if self._owners[owner]:
            self.acquire(owner, size)
        else:
            self._add(owner, size)

    def release(self, owner: str, size: int) -> None:
        """Release `size` bytes of an owner."""
        self.used -= size
        self._owners -= Counter({owner: size})

    def _add(self, owner: str, size: int) -> None:
        self.used += size
        self._owners[owner] += size


class Reservation:
    """The memory that one body reserves."""

    def __init__(self, budget: MemoryBudget, owner: str) -> None:
        self._budget = budget
        self._owner = owner
        self._bytes = self._values = self._objects = 0
        self._wide = False
        self.used = 0

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
        text = self._bytes * (_WIDE_CHARACTER if self._wide else 1)
        self.grow(text + _VALUE_BYTES * self._values + _OBJECT_BYTES * self._objects)

    def grow(self, length: int) -> None:
        """Extend the reservation to `length` bytes. Raises UnavailableError."""
        more = length - _FREE_BYTES - self.used
        if more > 0:
            self._budget.acquire(self._owner, more, own=self.used)
            self.used += more

    def reserve_length(self, length: int) -> None:
        """Reserve `length` bytes at the start. Raises UnavailableError only if the owner has other reservations.

        A body larger than the whole budget would otherwise be refused again and again.
        """
        if (more := length - _FREE_BYTES) > 0:
            self._budget.acquire_any_if_alone(self._owner, more)
            self.used = more

    def release_all(self) -> None:
        if self.used:
            self._budget.release(self._owner, self.used)
            self.used = 0
