"""How waiting choices are ordered."""

from typing import Protocol

from tercet.scheduler.core.config import PolicyName
from tercet.scheduler.core.prefix_cache import PrefixCache
from tercet.scheduler.core.request import Req

LONGEST_MEASURED = 128
"""Choices whose cached prefix is measured in one step, at most; for lpm a longer queue goes on in order of arrival."""


class SchedulePolicy(Protocol):
    """An order of admission. Ageing and retraction are the queue's, so a policy need not be fair."""

    def order(self, waiting: list[Req], cache: PrefixCache) -> list[Req]:
        """`waiting` (in order of arrival), best first."""
        ...


class FirstComeFirstServed:
    """In order of arrival."""

    def order(self, waiting: list[Req], cache: PrefixCache) -> list[Req]:  # noqa: ARG002
        """Unchanged."""
        return waiting


class LongestPrefixMatch:
    """Those with the most cached tokens first: they cost least, and their prefix is still there."""

    def order(self, waiting: list[Req], cache: PrefixCache) -> list[Req]:
        """By cached tokens, then by arrival."""
        if len(waiting) < 2:
            return waiting
        measured = waiting[:LONGEST_MEASURED]
        return sorted(measured, key=lambda req: (-req.cached_pages(cache), req.arrival)) + waiting[LONGEST_MEASURED:]


class PriorityFirst:
    """The highest priority first."""

    def order(self, waiting: list[Req], cache: PrefixCache) -> list[Req]:  # noqa: ARG002
        """By priority, then by arrival."""
        return sorted(waiting, key=lambda req: (-req.priority, req.arrival))


POLICIES: dict[PolicyName, type[SchedulePolicy]] = {
    PolicyName.FCFS: FirstComeFirstServed,
    PolicyName.LPM: LongestPrefixMatch,
    PolicyName.PRIORITY: PriorityFirst,
}
