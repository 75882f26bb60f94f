"""Which part of a model a process holds: the one place that tensor parallelism starts from."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `rank` of `size` equal parts of everything that is split."""

    rank: int = 0
    size: int = 1

    def share(self, count: int, what: str) -> int:
        """How many of `count` this process holds. Raises ValueError when they do not divide evenly."""
        if count % self.size:
            raise ValueError(f"{count} {what} cannot be split over {self.size} processes")
        return count // self.size


WHOLE = Shard()
"""Everything in one process."""
