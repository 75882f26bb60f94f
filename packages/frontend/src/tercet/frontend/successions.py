"""Which weights have taken the place of others under running schedulers."""


class Successions:
    """By fingerprint. A scheduler that is told to goes on with other weights; its requests do, too, if they must."""

    def __init__(self) -> None:
        self._next: dict[str, str] = {}
        self._paths: dict[str, str] = {}

    def note(self, old: str, new: str, path: str) -> None:
        """A scheduler that had the old ones has the new ones, which lie there.

        Weights that come back succeed what had followed them.
        """
        self._next.pop(new, None)
        self._paths[new] = path
        if old != new:
            self._next[old] = new

    def forget(self, old: str) -> None:
        """Nothing has come of those: who starts with them keeps them."""
        self._next.pop(old, None)

    def latest(self, weights: str) -> str:
        """What has come of weights; themselves, if nothing has."""
        while weights in self._next:
            weights = self._next[weights]
        return weights

    def path(self, weights: str) -> str:
        """Where weights lie that have followed others."""
        return self._paths[weights]

    def follows(self, new: str, old: str) -> bool:
        """Whether the one is what has come of the other."""
        return new != old and self.latest(old) == new
