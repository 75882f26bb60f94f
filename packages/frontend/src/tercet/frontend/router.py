"""Which scheduler and which detokenizer a request goes to."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from tercet.frontend.fleet import DetokenizerPeer, SchedulerPeer
from tercet.frontend.req_state import ReqState

_Peer = TypeVar("_Peer")


class RoutingPolicy(Protocol):
    """Orders the schedulers that can take a request, the best first. Later ones are tried when a queue is full."""

    def order(self, state: ReqState, schedulers: Sequence[SchedulerPeer]) -> list[SchedulerPeer]:
        """All of `schedulers`, which is never empty."""
        ...


class RoundRobin:
    """Each request to the next scheduler."""

    def __init__(self) -> None:
        self._next = 0

    def order(self, state: ReqState, schedulers: Sequence[SchedulerPeer]) -> list[SchedulerPeer]:  # noqa: ARG002
        """The same order for every request, turned by one each time."""
        self._next += 1
        return _turned(schedulers, self._next - 1)


class LeastLoaded:
    """Each request to the scheduler whose last heartbeat told of the fewest tokens to compute."""

    def __init__(self) -> None:
        self._ties = RoundRobin()

    def order(self, state: ReqState, schedulers: Sequence[SchedulerPeer]) -> list[SchedulerPeer]:
        """By queued and running tokens; equals take turns."""
        ordered = self._ties.order(state, schedulers)
        return sorted(ordered, key=lambda each: each.tokens)


POLICIES: dict[str, Callable[[], RoutingPolicy]] = {"round_robin": RoundRobin, "least_loaded": LeastLoaded}


class DataParallelController:
    """Spreads requests over schedulers by a policy, and over detokenizers in turn."""

    def __init__(self, policy: RoutingPolicy) -> None:
        self._policy = policy
        self._next_detokenizer = 0

    def schedulers(self, state: ReqState, eligible: Sequence[SchedulerPeer]) -> list[SchedulerPeer]:
        """Where to try a request, in order: first where it runs already, last where it was refused."""
        if not eligible:
            return []
        ordered = self._policy.order(state, eligible)
        return sorted(ordered, key=lambda each: (each.peer in state.refused_by, each.peer != state.scheduler))

    def sent(self, state: ReqState, scheduler: SchedulerPeer) -> None:
        """A request went there."""
        scheduler.sent += state.prompt_tokens + state.output_tokens

    def detokenizer(self, eligible: Sequence[DetokenizerPeer], avoid: str = "") -> DetokenizerPeer | None:
        """The next in turn, and not the one to avoid unless there is no other."""
        eligible = [each for each in eligible if each.peer != avoid] or eligible
        if not eligible:
            return None
        self._next_detokenizer += 1
        return eligible[(self._next_detokenizer - 1) % len(eligible)]


def _turned(peers: Sequence[_Peer], by: int) -> list[_Peer]:
    start = by % len(peers)
    return [*peers[start:], *peers[:start]]
