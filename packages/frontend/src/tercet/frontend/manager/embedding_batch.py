"""Inputs of one embedding request, sent in windows so that no single request fills a scheduler's queue."""

from collections import deque
from collections.abc import Callable

from tercet.frontend.manager.embedding_state import EmbeddingState
from tercet.frontend.manager.quota import RequestSlot
from tercet.frontend.routing.single_waiter_event import SingleWaiterEvent

MAX_IN_FLIGHT = 256
"""Maximum number of inputs of one HTTP request that are at schedulers at the same time."""


class EmbeddingBatch:
    """States of the inputs, in input order; they share one event."""

    def __init__(self, slot: RequestSlot) -> None:
        self.slot = slot
        self.wake = SingleWaiterEvent()
        self.states: list[EmbeddingState] = []

    async def run(self, start: Callable[[EmbeddingState], None]) -> None:
        """Dispatch every input and wait for its vector. Raises the ApiError of the first input that fails."""
        waiting, running = deque(self.states), list[EmbeddingState]()
        while waiting or running:
            while waiting and len(running) < MAX_IN_FLIGHT:
                running.append(waiting.popleft())
                start(running[-1])
            await self.wake.wait()
            for state in running:
                if state.error is not None:
                    raise state.error
            running = [state for state in running if not state.done]

    @property
    def tokens(self) -> int:
        return sum(state.prompt_tokens for state in self.states)

    @property
    def vectors(self) -> list[bytes]:
        """Return the vector of each input; valid once `run` has returned."""
        return [state.vector for state in self.states]
