"""Which adapters an executor has at hand, at how few places it has for them, and how many choices use each."""

from tercet.protocol.messages.values import LoRAAdapter
from tercet.scheduler.core.plan import AdapterLoad


class AdapterSlots:
    """An adapter stays at its place when its last user is gone, until another needs the place.

    The least recently used one goes first. A plan in flight may still read it: so a choice gives its adapter back only
    when no plan in flight names the choice.
    """

    def __init__(self, count: int) -> None:
        self._empty = list(range(count - 1, -1, -1))
        self._places: dict[LoRAAdapter, int] = {}
        self.users: dict[LoRAAdapter, int] = {}
        """Running choices of each adapter that has some."""
        self._idle: dict[LoRAAdapter, None] = {}
        """Those at a place that nobody uses; the least recently used first."""
        self.loads: list[AdapterLoad] = []
        """What the next plan must bring to its place."""

    @property
    def count(self) -> int:
        """How many places there are."""
        return len(self._empty) + len(self._places)

    def place_of(self, adapter: LoRAAdapter) -> int:
        """Where it is, or will be with the next plan; -1 for nowhere."""
        return self._places.get(adapter, -1)

    def has_room(self, adapter: LoRAAdapter | None) -> bool:
        """Whether `take` would find a place."""
        return adapter is None or adapter in self._places or bool(self._empty or self._idle)

    def take(self, adapter: LoRAAdapter) -> int:
        """The place of an adapter, for one more user. Call it only where there is room."""
        if adapter not in self._places:
            self._places[adapter] = place = self._empty.pop() if self._empty else self._reused()
            self.loads.append(AdapterLoad(place, adapter))
        self._idle.pop(adapter, None)
        self.users[adapter] = self.users.get(adapter, 0) + 1
        return self._places[adapter]

    def give_back(self, adapter: LoRAAdapter) -> None:
        """One user less."""
        self.users[adapter] -= 1
        if not self.users[adapter]:
            del self.users[adapter]
            self._idle[adapter] = None

    def forget(self) -> None:
        """No adapter is at its place any more. Nobody uses one."""
        self._empty = list(range(self.count - 1, -1, -1))
        self._places.clear()
        self._idle.clear()
        self.loads = []

    def _reused(self) -> int:
        """A place that nobody uses; what was to be brought there is not any more."""
        adapter = next(iter(self._idle))
        del self._idle[adapter]
        place = self._places.pop(adapter)
        self.loads = [load for load in self.loads if load.place != place]
        return place
