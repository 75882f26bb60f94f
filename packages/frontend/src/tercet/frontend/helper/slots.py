"""Slots for work on untrusted input, and a bounded queue for them, which API keys share."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from tercet.frontend.errors import UnavailableError
from tercet.frontend.http.auth import current_caller


class KeySlots:
    """Queue for `slots` slots. Work beyond `max_waiting` is refused.

    One API key uses at most all slots but one, and half of the queue. `work` names the work in messages, as a plural.
    """

    def __init__(self, slots: int, max_waiting: int, work: str) -> None:
        self._count = slots
        self._work = work
        self._slots = asyncio.Semaphore(slots)
        self._slots_by_key: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._waiting_by_key: Counter[str] = Counter()
        self._max = slots + max_waiting

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold a slot. Raises UnavailableError if many wait."""
        owner = current_caller().owner
        if self._waiting_by_key.total() >= self._max or (owner and self._waiting_by_key[owner] >= self._max // 2):
            raise overloaded(f"Too many {self._work} wait.")
        self._waiting_by_key[owner] += 1
        try:
            async with self._key_slots(owner), self._slots:
                yield
        finally:
            self._waiting_by_key -= Counter([owner])

    def _key_slots(self, owner: str) -> asyncio.Semaphore:
        """Return a key's semaphore. It admits less work than there are slots, so other keys find one free."""
        slots = self._slots_by_key.get(owner)
        if slots is None:
            slots = self._slots_by_key[owner] = asyncio.Semaphore(max(1, self._count - 1) if owner else self._count)
        return slots


def overloaded(message: str) -> UnavailableError:
    """Return the error for work that may be tried again soon."""
    return UnavailableError(message, code="overloaded", retry_after=1)
