"""Choices that wait for a slot: retracted ones first, then new ones in the order of the policy."""

from collections.abc import Iterator

from tercet.scheduler.core.policy import SchedulePolicy
from tercet.scheduler.core.prefix_cache import PrefixCache
from tercet.scheduler.core.request import Req


class WaitingQueue:
    """The waiting line. Arrival numbers decide among equals, so a retracted choice keeps its place."""

    def __init__(self, policy: SchedulePolicy, patience: int) -> None:
        self._policy = policy
        self._patience = patience
        self._first: dict[Req, None] = {}
        self._rest: dict[Req, None] = {}
        self._sorted = True
        """Whether `_rest` is in order of arrival."""

    def __len__(self) -> int:
        return len(self._first) + len(self._rest)

    def __contains__(self, req: Req) -> bool:
        return req in self._first or req in self._rest

    def __iter__(self) -> Iterator[Req]:
        yield from self._first
        yield from self._rest

    def add(self, req: Req, *, first: bool = False) -> None:
        """Let a choice wait; `first` is for those that ran already, or resume what an earlier attempt began."""
        if first:
            self._first[req] = None
            return
        if self._rest and next(reversed(self._rest)).arrival > req.arrival:
            self._sorted = False
        self._rest[req] = None

    def remove(self, req: Req) -> None:
        """Take a choice out, admitted or aborted."""
        del (self._first if req in self._first else self._rest)[req]

    def in_order(self, cache: PrefixCache) -> list[Req]:
        """Who should be admitted next: those that go first, those that lost patience, then the policy's choice."""
        if not self._sorted:
            self._rest = dict(sorted(self._rest.items(), key=lambda item: item[0].arrival))
            self._sorted = True
        first = sorted(self._first, key=lambda req: req.arrival)
        aged = [req for req in self._rest if req.passed_over >= self._patience]
        if not aged:
            return first + self._policy.order(list(self._rest), cache)
        young = [req for req in self._rest if req.passed_over < self._patience]
        return first + aged + self._policy.order(young, cache)

    def count_passed_over(self, admitted: list[Req]) -> None:
        """Age everyone who was passed over by a later arrival in this step."""
        latest = max(req.arrival for req in admitted)
        for req in self:
            if req.arrival < latest:
                req.passed_over += 1
