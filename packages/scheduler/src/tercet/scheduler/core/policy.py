"""How waiting choices are ordered."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from tercet.scheduler.core.config import PolicyName
from tercet.scheduler.core.fair_share import FairShare
from tercet.scheduler.core.prefix_cache import PrefixCache
from tercet.scheduler.core.request import Req

LONGEST_MEASURED = 128
"""Choices whose cached prefix is measured in one step, at most; for lpm a longer queue goes on in order of arrival."""


class SchedulePolicy(Protocol):
    """An order of admission. Ageing and retraction are the queue's, so a policy need not be fair.

    It is told what becomes of choices, for its order may depend on it.
    """

    def order(self, waiting: list[Req], cache: PrefixCache) -> Iterable[Req]:
        """`waiting` (in order of arrival), best first. Which is next may depend on whether those before were admitted.

        Nothing comes of asking alone: not everybody who asks admits.
        """
        ...

    def overtaken(self, waiting: Iterable[Req], admitted: Sequence[Req], skipped: Sequence[Req]) -> Iterable[Req]:
        """Whom of those still `waiting` a step wronged, so that they age.

        Of those that it `skipped`, in order, each could have run, and stood before one that was `admitted`.
        """
        ...

    def goes_first(self, req: Req) -> bool:
        """Whether a choice that arrives queues before all others, for an earlier attempt has begun it elsewhere."""
        ...

    def joined(self, req: Req) -> None:
        """A choice has begun to wait, new or retracted."""

    def left(self, req: Req) -> None:
        """A choice waits no more."""

    def admitted(self, req: Req) -> None:
        """A choice has left for a slot, and needs all that it has not `computed`."""

    def advanced(self, reqs: Iterable[Req]) -> None:
        """A step with these choices is over: they may have more tokens. One may be named several times, or be gone."""

    def ended(self, req: Req) -> None:
        """A choice has its final answer."""


class _ByArrival:
    """What policies have in common to which all choices are alike, whoever's they are: they need not be told of any."""

    def overtaken(self, waiting: Iterable[Req], admitted: Sequence[Req], skipped: Sequence[Req]) -> Iterable[Req]:  # noqa: ARG002
        """Those that came before the last of the admitted."""
        latest = max(req.arrival for req in admitted)
        return (req for req in waiting if req.arrival < latest)

    def goes_first(self, req: Req) -> bool:
        """Whenever one has."""
        return req.resumed

    def joined(self, req: Req) -> None:
        """Nothing."""

    def left(self, req: Req) -> None:
        """Nothing."""

    def admitted(self, req: Req) -> None:
        """Nothing."""

    def advanced(self, reqs: Iterable[Req]) -> None:
        """Nothing."""

    def ended(self, req: Req) -> None:
        """Nothing."""


class FirstComeFirstServed(_ByArrival):
    """In order of arrival."""

    def order(self, waiting: list[Req], cache: PrefixCache) -> list[Req]:  # noqa: ARG002
        """Unchanged."""
        return waiting


class LongestPrefixMatch(_ByArrival):
    """Those with the most cached tokens first: they cost least, and their prefix is still there."""

    def order(self, waiting: list[Req], cache: PrefixCache) -> list[Req]:
        """By cached tokens, then by arrival."""
        if len(waiting) < 2:
            return waiting
        measured = waiting[:LONGEST_MEASURED]
        return sorted(measured, key=lambda req: (-req.cached_pages(cache), req.arrival)) + waiting[LONGEST_MEASURED:]


class PriorityFirst(_ByArrival):
    """The highest priority first."""

    def order(self, waiting: list[Req], cache: PrefixCache) -> list[Req]:  # noqa: ARG002
        """By priority, then by arrival."""
        return sorted(waiting, key=lambda req: (-req.priority, req.arrival))


POLICIES: dict[PolicyName, type[SchedulePolicy]] = {
    PolicyName.FCFS: FirstComeFirstServed,
    PolicyName.LPM: LongestPrefixMatch,
    PolicyName.PRIORITY: PriorityFirst,
    PolicyName.FAIR: FairShare,
}
