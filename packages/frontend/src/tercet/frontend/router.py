"""Which scheduler and which detokenizer a request goes to."""

from collections.abc import Sequence

from tercet.frontend.fleet import DetokenizerPeer, SchedulerPeer
from tercet.frontend.in_flight import InFlight
from tercet.frontend.routing_policy import LeastLoaded, RoutingPolicy


class DataParallelController:
    """Spreads requests over schedulers by a policy, and over detokenizers in turn."""

    def __init__(self, policy: RoutingPolicy) -> None:
        self._policy = policy
        self._by_load = LeastLoaded()
        """For inputs of encoders, which cache nothing."""
        self._next_detokenizer = 0
        self._loads: dict[str, tuple[SchedulerPeer, int]] = {}
        """Where each request is, by its rid, and how many tokens it had when it was sent there."""

    def schedulers(self, state: InFlight, eligible: Sequence[SchedulerPeer]) -> list[SchedulerPeer]:
        """Where to try a request, in order: first where it runs already, last where that was in vain.

        Those are late, too, where it would have to wait for other weights.
        """
        if not eligible:
            return []
        ordered = (self._policy if state.has_text else self._by_load).order(state, eligible)
        vain = state.refused_by | state.unheard_at
        return sorted(ordered, key=lambda each: (each.peer in vain, each.load.updating, each.peer != state.scheduler))

    def sent(self, state: InFlight, scheduler: SchedulerPeer) -> None:
        """A request went there."""
        self.ended(state)
        tokens = state.prompt_tokens + state.output_tokens
        scheduler.own += tokens
        self._loads[state.rid] = scheduler, tokens
        if state.has_text:
            self._policy.sent(state, scheduler)

    def ended(self, state: InFlight) -> None:
        """A request is not where it was sent any more. Harmless for one that is nowhere."""
        if load := self._loads.pop(state.rid, None):
            scheduler, tokens = load
            scheduler.own -= tokens

    def gone(self, peer: str) -> None:
        """A scheduler is no more."""
        self._policy.gone(peer)

    def detokenizer(self, eligible: Sequence[DetokenizerPeer], avoid: str = "") -> DetokenizerPeer | None:
        """The next in turn, and not the one to avoid unless there is no other."""
        eligible = [each for each in eligible if each.peer != avoid] or eligible
        if not eligible:
            return None
        self._next_detokenizer += 1
        return eligible[(self._next_detokenizer - 1) % len(eligible)]
