"""Which weights have taken the place of others under running schedulers."""

from itertools import islice

MOST = 1000


class WeightLineage:
    """Which weights replaced which, by fingerprint. Requests whose weights no scheduler has any more follow them.

    `MOST` are remembered: the first, for schedulers are started with those weights, and the latest.
    """

    def __init__(self) -> None:
        self._latest: dict[str, str] = {}
        self._paths: dict[str, str] = {}

    def note(self, old: str, new: str, path: str) -> None:
        """A scheduler gave up the `old` weights for the `new` ones, which lie at `path`.

        Weights that come back count as the latest again, and what had replaced them as replaced.
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
        """The old weights count as replaced no more: schedulers that start with them keep them."""
        self._latest.pop(old, None)

    def latest(self, weights: str) -> str:
        """The weights that replaced these last; these themselves if none did."""
        return self._latest.get(weights, weights)

    def path(self, weights: str) -> str:
        """The directory of weights that replaced others."""
        return self._paths[weights]

    def follows(self, new: str, old: str) -> bool:
        """Whether the new weights are those that replaced the old ones last."""
        return new != old and self.latest(old) == new
