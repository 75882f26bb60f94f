"""Selection of a scheduler and a detokenizer for each request."""

from collections.abc import Sequence

from tercet.frontend.routing.peers import DetokenizerPeer, SchedulerPeer
from tercet.frontend.routing.policies import LeastLoaded, RoutingPolicy
from tercet.frontend.routing.request_state import RequestState


class DataParallelController:
    """Router of requests to schedulers by policy, and to detokenizers in rotation."""

    def __init__(self, policy: RoutingPolicy) -> None:
        self._policy = policy
        self._by_load = LeastLoaded()
        """Policy for encoders, which have no prefix cache."""
        self._next_detokenizer = 0
        self._loads: dict[str, tuple[SchedulerPeer, int]] = {}
        """By rid: the scheduler of a request and its number of tokens at dispatch."""

    def schedulers(self, state: RequestState, eligible: Sequence[SchedulerPeer]) -> list[SchedulerPeer]:
        """Return the schedulers to try, in order.

        Its present scheduler comes first, then the others in the policy's order, then those about to load other
        weights, and last those that rejected the request or held it without output.
        """
        if not eligible:
            return []
        ordered = (self._policy if state.has_text else self._by_load).order(state, eligible)
        deprioritized = state.refused_by | state.stalled_at
        return sorted(
            ordered, key=lambda each: (each.peer in deprioritized, each.load.updating, each.peer != state.scheduler)
        )

    def on_dispatched(self, state: RequestState, scheduler: SchedulerPeer) -> None:
        """Record that a request was sent to a scheduler."""
        self.release(state)
        tokens = state.prompt_tokens + state.output_tokens
        scheduler.own_tokens += tokens
        self._loads[state.rid] = scheduler, tokens
        if state.has_text:
            self._policy.on_dispatched(state, scheduler)

    def release(self, state: RequestState) -> None:
        """Record that a request left its scheduler. Idempotent."""
        if load := self._loads.pop(state.rid, None):
            scheduler, tokens = load
            scheduler.own_tokens -= tokens

    def on_peer_down(self, peer: str) -> None:
        """Forget a scheduler that went down."""
        self._policy.on_peer_down(peer)

    def detokenizer(self, eligible: Sequence[DetokenizerPeer], avoid: str = "") -> DetokenizerPeer | None:
        """Return the next detokenizer in rotation, avoiding `avoid` if possible; None without an eligible one."""
        eligible = [each for each in eligible if each.peer != avoid] or eligible
        if not eligible:
            return None
        self._next_detokenizer += 1
        return eligible[(self._next_detokenizer - 1) % len(eligible)]
