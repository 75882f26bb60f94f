"""Which weights have taken the place of others under running schedulers."""


class Successions:
    """By fingerprint. A scheduler that is told to goes on with other weights; its requests do, too, if they must."""

    def __init__(self) -> None:
        self._next: dict[str, str] = {}

    def note(self, old: str, new: str) -> None:
        """A scheduler that had the old ones has the new ones. Weights that come back succeed what had followed them."""
        self._next.pop(new, None)
        if old != new:
            self._next[old] = new

    def latest(self, weights: str) -> str:
        """What has come of weights; themselves, if nothing has."""
        while weights in self._next:
            weights = self._next[weights]
        return weights

    def follows(self, new: str, old: str) -> bool:
        """Whether the one is what has come of the other."""
        return new != old and self.latest(old) == new
