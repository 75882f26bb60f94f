"""Policies that order waiting choices."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from tercet.scheduler.core.cache.prefix_cache import PrefixCache
from tercet.scheduler.core.config import PolicyName
from tercet.scheduler.core.request import Req
from tercet.scheduler.core.waiting.fair_share import FairShare

LONGEST_MEASURED = 128
"""Maximum choices whose cached prefix is measured in one step; lpm keeps the rest in order of arrival."""


class SchedulePolicy(Protocol):
    """Order of admission. The queue ages and retracts choices, so a policy need not be fair.

    It is notified of the state changes of choices, because its order may depend on them.
    """

    def order(self, waiting: list[Req], cache: PrefixCache) -> Iterable[Req]:
        """Return `waiting` (in order of arrival), best first.

        The next one may depend on whether those before were admitted. The call itself changes nothing: not every caller
        admits.
        """
        ...

    def overtaken(self, waiting: Iterable[Req], admitted: Sequence[Req], skipped: Sequence[Req]) -> Iterable[Req]:
        """Return the choices of `waiting` that a step overtook, so that they age.

        Each of `skipped`, in order, could have run, and stood before one that was `admitted`.
        """
        ...

    def goes_first(self, req: Req) -> bool:
        """Return whether an arriving choice queues first, because an earlier attempt has started it elsewhere."""
        ...

    def joined(self, req: Req) -> None:
        """Note that a choice has begun to wait, new or retracted."""

    def left(self, req: Req) -> None:
        """Note that a choice no longer waits."""

    def admitted(self, req: Req) -> None:
        """Note that a choice got a slot, and must compute all tokens after `computed`."""

    def advanced(self, reqs: Iterable[Req]) -> None:
        """Note the end of a step with these choices: they may have more tokens.

        One may be named several times, or be gone.
        """

    def ended(self, req: Req) -> None:
        """Note that a choice has its final answer."""


class _ByArrival:
    """Base of policies that treat all tenants alike and therefore ignore notifications."""

    def overtaken(self, waiting: Iterable[Req], admitted: Sequence[Req], skipped: Sequence[Req]) -> Iterable[Req]:  # noqa: ARG002
        """Return the choices that arrived before the last of the admitted ones."""
        latest = max(req.arrival for req in admitted)
        return (req for req in waiting if req.arrival < latest)

    def goes_first(self, req: Req) -> bool:
        return req.resumed

    def joined(self, req: Req) -> None:
        pass

    def left(self, req: Req) -> None:
        pass

    def admitted(self, req: Req) -> None:
        pass

    def advanced(self, reqs: Iterable[Req]) -> None:
        pass

    def ended(self, req: Req) -> None:
        pass


class FirstComeFirstServed(_ByArrival):
    """Policy fcfs: order of arrival."""

    def order(self, waiting: list[Req], cache: PrefixCache) -> list[Req]:  # noqa: ARG002
        return waiting


class LongestPrefixMatch(_ByArrival):
    """Policy lpm: most cached tokens first. They cost least, and their prefix is still cached."""

    def order(self, waiting: list[Req], cache: PrefixCache) -> list[Req]:
        """Sort by cached tokens, then by arrival."""
        if len(waiting) < 2:
            return waiting
        measured = waiting[:LONGEST_MEASURED]
        return sorted(measured, key=lambda req: (-req.cached_pages(cache), req.arrival)) + waiting[LONGEST_MEASURED:]


class PriorityFirst(_ByArrival):
    """Policy priority: highest priority first."""

    def order(self, waiting: list[Req], cache: PrefixCache) -> list[Req]:  # noqa: ARG002
        """Sort by priority, then by arrival."""
        return sorted(waiting, key=lambda req: (-req.priority, req.arrival))


POLICIES: dict[PolicyName, type[SchedulePolicy]] = {
    PolicyName.FCFS: FirstComeFirstServed,
    PolicyName.LPM: LongestPrefixMatch,
    PolicyName.PRIORITY: PriorityFirst,
    PolicyName.FAIR: FairShare,
}
