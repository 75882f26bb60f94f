"""Lineage of weights that were replaced in running schedulers."""

from itertools import islice

MAX_ENTRIES = 1000


class WeightLineage:
    """Map from replaced weights to their latest successor, by fingerprint.

    Requests move to the successor once no scheduler has their weights. At most `MAX_ENTRIES` entries are kept: the
    first one, since schedulers may be started with those weights, and the latest.
    """

    def __init__(self) -> None:
        self._latest: dict[str, str] = {}
        self._paths: dict[str, str] = {}

    def record(self, old: str, new: str, path: str) -> None:
        """Record that a scheduler replaced its `old` weights by the `new` ones at `path`.

        Weights that return become the latest again, and their former successors count as replaced.
        """
        self._latest.pop(new, None)
        self._latest = {each: new if latest == old else latest for each, latest in self._latest.items()}
        if old != new:
            self._latest[old] = new
        if len(self._latest) > MAX_ENTRIES:
            del self._latest[next(islice(self._latest, 1, None))]
        self._paths[new] = path
        latest = {*self._latest.values()}
        self._paths = {each: path for each, path in self._paths.items() if each in latest}

    def forget(self, old: str) -> None:
        """Remove weights from the lineage: schedulers that start with them keep them."""
        self._latest.pop(old, None)

    def latest(self, weights: str) -> str:
        """Return the latest successor of these weights, or the weights themselves."""
        return self._latest.get(weights, weights)

    def path(self, weights: str) -> str:
        """Return the directory of weights that replaced others."""
        return self._paths[weights]

    def follows(self, new: str, old: str) -> bool:
        """Return whether `new` is the latest successor of `old`."""
        return new != old and self.latest(old) == new
