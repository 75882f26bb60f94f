"""Which weights have taken the place of others under running schedulers."""

from itertools import islice

MOST = 1000


class Successions:
    """By fingerprint. A scheduler that is told to goes on with other weights; its requests do, too, if they must.

    So many are remembered: the first, which schedulers are started with, and the last ones.
    """

    def __init__(self) -> None:
        self._latest: dict[str, str] = {}
        self._paths: dict[str, str] = {}

    def note(self, old: str, new: str, path: str) -> None:
        """A scheduler that had the old ones has the new ones, which lie there.

        Weights that come back succeed what had followed them.
        """
        self._latest.pop(new, None)
        self._latest = {each: new if latest == old else latest for each, latest in self._latest.items()}
        if old != new:
            self._latest[old] = new
        if len(self._latest) > MOST:
            del self._latest[next(islice(self._latest, 1, None))]
        self._paths[new] = path
        latest = {*self._latest.values()}
        self._paths = {each: path for each, path in self._paths.items() if each in latest}

    def forget(self, old: str) -> None:
        """Nothing has come of those: who starts with them keeps them."""
        self._latest.pop(old, None)

    def latest(self, weights: str) -> str:
        """What has come of weights; themselves, if nothing has."""
        return self._latest.get(weights, weights)

    def path(self, weights: str) -> str:
        """Where weights lie that others are given up for."""
        return self._paths[weights]

    def follows(self, new: str, old: str) -> bool:
        """Whether the one is what has come of the other."""
        return new != old and self.latest(old) == new
