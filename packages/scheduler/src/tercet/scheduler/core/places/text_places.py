"""Places of encoded texts, each of as many pages as its text needs."""

from typing import NamedTuple

from tercet.scheduler.core.places.loads import TextCapacity, TextLoad
from tercet.scheduler.core.places.places import Places

_TOKEN_BYTES = 4


class HeldText(NamedTuple):
    """Text of one namespace of the prefix cache."""

    namespace: str
    ids: bytes


class TextPlaces(Places[HeldText]):
    """Places that share pages. A text without users keeps its pages until another text needs them."""

    def __init__(self, capacity: TextCapacity | None) -> None:
        super().__init__(0 if capacity is None else capacity.places)
        self._page_size = 1 if capacity is None else capacity.page_size
        self._count = 0 if capacity is None else capacity.pages
        self.free_pages = list(range(self._count - 1, -1, -1))
        self.pages: dict[HeldText, list[int]] = {}
        """Pages of each text that has a place."""

    def has_room(self, key: HeldText | None) -> bool:
        """Return whether `take` would find a place and pages."""
        if key is None or key in self.pages:
            return True
        idle = sum(len(self.pages[each]) for each in self._idle)
        return super().has_room(key) and self._needed(key) <= len(self.free_pages) + idle

    def take(self, key: HeldText | None) -> int:
        """See `Places.take`."""
        if key is not None and key not in self.pages:
            while len(self.free_pages) < self._needed(key):
                self._empty.append(self._evict())
            pages = [self.free_pages.pop() for _ in range(self._needed(key))]
            place = super().take(key)
            self.pages[key] = pages
            return place
        return super().take(key)

    def pop_text_loads(self) -> list[TextLoad]:
        """Return the texts that the next plan encodes, and forget them."""
        return [TextLoad(place, key.ids, self.pages[key]) for place, key in self.pop_loads()]

    def reset(self) -> None:
        """See `Places.reset`."""
        super().reset()
        self.free_pages = list(range(self._count - 1, -1, -1))
        self.pages.clear()

    def _evict(self) -> int:
        """Do as `Places` does, and free the text's pages."""
        self.free_pages += self.pages.pop(next(iter(self._idle)))
        return super()._evict()

    def _needed(self, key: HeldText) -> int:
        """Return the number of pages of a text."""
        return -(-(len(key.ids) // _TOKEN_BYTES) // self._page_size)
