"""Adapter slots of an executor, and the adapters in them."""

from tercet.protocol.messages.values import LoRAAdapter
from tercet.scheduler.core.plan import AdapterLoad


class AdapterSlots:
    """Allocation of the adapter slots. An adapter without users stays in its slot until another adapter needs the slot.

    The least recently used one is replaced first. A plan in flight may still read it, so a choice releases its adapter
    only when no plan in flight names the choice.
    """

    def __init__(self, count: int) -> None:
        self._empty = list(range(count - 1, -1, -1))
        self._slots: dict[LoRAAdapter, int] = {}
        self.users: dict[LoRAAdapter, int] = {}
        """Number of running choices of each adapter that has any."""
        self._idle: dict[LoRAAdapter, None] = {}
        """Adapters in a slot without users, least recently used first."""
        self.loads: list[AdapterLoad] = []
        """Loads that the next plan must carry."""

    @property
    def count(self) -> int:
        return len(self._empty) + len(self._slots)

    def slot_of(self, adapter: LoRAAdapter) -> int:
        """Return the slot of an adapter, now or with the next plan; -1 if it has none."""
        return self._slots.get(adapter, -1)

    def has_room(self, adapter: LoRAAdapter | None) -> bool:
        """Return whether `take` would find a slot."""
        return adapter is None or adapter in self._slots or bool(self._empty or self._idle)

    def take(self, adapter: LoRAAdapter) -> int:
        """Return the slot of an adapter for one more user. Only valid if `has_room`."""
        if adapter not in self._slots:
            self._slots[adapter] = place = self._empty.pop() if self._empty else self._evict()
            self.loads.append(AdapterLoad(place, adapter))
        self._idle.pop(adapter, None)
        self.users[adapter] = self.users.get(adapter, 0) + 1
        return self._slots[adapter]

    def release(self, adapter: LoRAAdapter) -> None:
        """Remove one user."""
        self.users[adapter] -= 1
        if not self.users[adapter]:
            del self.users[adapter]
            self._idle[adapter] = None

    def reset(self) -> None:
        """Empty all slots. No adapter may have users."""
        self._empty = list(range(self.count - 1, -1, -1))
        self._slots.clear()
        self._idle.clear()
        self.loads = []

    def _evict(self) -> int:
        """Return the slot of the least recently used adapter without users, and cancel its pending load."""
        adapter = next(iter(self._idle))
        del self._idle[adapter]
        place = self._slots.pop(adapter)
        self.loads = [load for load in self.loads if load.place != place]
        return place
