"""Requests that one HTTP request was split into, and the stream of their updates."""

from collections.abc import AsyncIterator

import msgspec

from tercet.frontend.errors import ApiError
from tercet.frontend.manager.prediction import predicted_tokens
from tercet.frontend.manager.quota import RequestSlot
from tercet.frontend.manager.req_state import ReqState, Update
from tercet.frontend.routing.single_waiter_event import SingleWaiterEvent


class GenerationUpdate(msgspec.Struct, frozen=True):
    """Update of one choice of the prompt with the index `prompt`."""

    prompt: int
    update: Update


class Generation:
    """Request states that share one event, so their consumer receives all pending updates in one batch."""

    def __init__(self, slot: RequestSlot) -> None:
        self.slot = slot
        self.wake = SingleWaiterEvent()
        self.states: list[ReqState] = []

    def notify_on_finish_only(self) -> None:
        """Notify only when a choice has ended, for callers that need no part of an answer."""
        for state in self.states:
            state.finish_only = True

    async def arrivals(self) -> AsyncIterator[list[GenerationUpdate]]:
        """Yield non-empty lists of updates until every request is done. Raises the ApiError of a failed request."""
        while True:
            await self.wake.wait()
            updates: list[GenerationUpdate] = []
            error: ApiError | None = None
            done = True
            for prompt, state in enumerate(self.states):
                updates += [GenerationUpdate(prompt, update) for update in state.pop_updates()]
                # Read these before the yield: changes during the yield belong to the next round.
                error, done = error or state.error, done and state.done
            if updates:
                yield updates
            if error is not None:
                raise error
            if done:
                return

    @property
    def prompt_tokens(self) -> int:
        """Return the number of prompt tokens, counting each prompt once, not once per choice."""
        return sum(state.prompt_tokens for state in self.states)

    @property
    def cached_tokens(self) -> int:
        """Return the number of prompt tokens found in the prefix cache."""
        return sum(state.cached_tokens for state in self.states)

    @property
    def output_tokens(self) -> int:
        return sum(state.output_tokens for state in self.states)

    def prediction_tokens(self) -> tuple[int, int] | None:
        """Return (accepted, rejected) predicted tokens, or None if no request has a prediction."""
        pairs = [(state.prediction, choice) for state in self.states if state.prediction for choice in state.choices]
        if not pairs:
            return None
        accepted = sum(predicted_tokens(prediction, choice.token_ids) for prediction, choice in pairs)
        return accepted, sum(len(prediction) for prediction, _ in pairs) - accepted
