"""Which scheduler and which detokenizer a request goes to."""

from collections.abc import Sequence

from tercet.frontend.routing.peers import DetokenizerPeer, SchedulerPeer
from tercet.frontend.routing.policies import LeastLoaded, RoutingPolicy
from tercet.frontend.routing.request_state import RequestState


class DataParallelController:
    """Spreads requests over schedulers by a policy, and over detokenizers in turn."""

    def __init__(self, policy: RoutingPolicy) -> None:
        self._policy = policy
        self._by_load = LeastLoaded()
        """Orders schedulers for inputs of encoders, which cache nothing."""
        self._next_detokenizer = 0
        self._loads: dict[str, tuple[SchedulerPeer, int]] = {}
        """By rid: the scheduler that a request was sent to, and how many tokens it had then."""

    def schedulers(self, state: RequestState, eligible: Sequence[SchedulerPeer]) -> list[SchedulerPeer]:
        """Schedulers to try for a request, in order.

        Its present one comes first, then the others as the policy orders them, then those that are about to load other
        weights, and last those that refused it or held it and sent nothing.
        """
        if not eligible:
            return []
        ordered = (self._policy if state.has_text else self._by_load).order(state, eligible)
        vain = state.refused_by | state.unheard_at
        return sorted(ordered, key=lambda each: (each.peer in vain, each.load.updating, each.peer != state.scheduler))

    def sent(self, state: RequestState, scheduler: SchedulerPeer) -> None:
        """A request was sent to a scheduler."""
        self.ended(state)
        tokens = state.prompt_tokens + state.output_tokens
        scheduler.own += tokens
        self._loads[state.rid] = scheduler, tokens
        if state.has_text:
            self._policy.sent(state, scheduler)

    def ended(self, state: RequestState) -> None:
        """A request is no longer with its scheduler. Harmless for one that has none."""
        if load := self._loads.pop(state.rid, None):
            scheduler, tokens = load
            scheduler.own -= tokens

    def gone(self, peer: str) -> None:
        """A scheduler is no more."""
        self._policy.gone(peer)

    def detokenizer(self, eligible: Sequence[DetokenizerPeer], avoid: str = "") -> DetokenizerPeer | None:
        """The next detokenizer in turn, other than the one to avoid if there is another. None if there is none."""
        eligible = [each for each in eligible if each.peer != avoid] or eligible
        if not eligible:
            return None
        self._next_detokenizer += 1
        return eligible[(self._next_detokenizer - 1) % len(eligible)]
