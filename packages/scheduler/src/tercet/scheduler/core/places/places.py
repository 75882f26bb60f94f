"""Places of one kind, and the keys in them."""

from typing import Generic, TypeVar

KeyT = TypeVar("KeyT")


class Places(Generic[KeyT]):
    """Allocation of places. A key without users stays in its place until another key needs the place.

    The least recently used one is replaced first. A plan in flight may still read it, so a choice releases its key only
    when no plan in flight names the choice.
    """

    def __init__(self, count: int) -> None:
        self._empty = list(range(count - 1, -1, -1))
        self._places: dict[KeyT, int] = {}
        self.users: dict[KeyT, int] = {}
        """Number of running choices of each key that has any."""
        self._idle: dict[KeyT, None] = {}
        """Keys in a place without users, least recently used first."""
        self.loads: dict[int, KeyT] = {}
        """Loads that the next plan must carry, by place."""

    @property
    def count(self) -> int:
        return len(self._empty) + len(self._places)

    def place_of(self, key: KeyT) -> int:
        """Return the place of a key, now or with the next plan; -1 if it has none."""
        return self._places.get(key, -1)

    def has_room(self, key: KeyT | None) -> bool:
        """Return whether `take` would find a place."""
        return key is None or key in self._places or bool(self._empty or self._idle)

    def take(self, key: KeyT | None) -> int:
        """Return the place of a key for one more user, -1 for None. Only valid if `has_room`."""
        if key is None:
            return -1
        if key not in self._places:
            self._places[key] = place = self._empty.pop() if self._empty else self._evict()
            self.loads[place] = key
        self._idle.pop(key, None)
        self.users[key] = self.users.get(key, 0) + 1
        return self._places[key]

    def release(self, key: KeyT | None) -> None:
        """Remove one user."""
        if key is None:
            return
        self.users[key] -= 1
        if not self.users[key]:
            del self.users[key]
            self._idle[key] = None

    def pop_loads(self) -> list[tuple[int, KeyT]]:
        """Return the loads for the next plan, and forget them."""
        loads, self.loads = self.loads, {}
        return [*loads.items()]

    def reset(self) -> None:
        """Empty all places. No key may have users."""
        self._empty = list(range(self.count - 1, -1, -1))
        self._places.clear()
        self._idle.clear()
        self.loads = {}

    def _evict(self) -> int:
        """Return the place of the least recently used key without users, and cancel its pending load."""
        key = next(iter(self._idle))
        del self._idle[key]
        place = self._places.pop(key)
        self.loads.pop(place, None)
        return place
