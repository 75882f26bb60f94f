"""The inputs one HTTP request became, on their way a window at a time: no request fills a scheduler's queue alone."""

from collections import deque
from collections.abc import Callable

from tercet.frontend.manager.embedding_state import EmbeddingState
from tercet.frontend.manager.quota import RequestSlot
from tercet.frontend.routing.wake import Wake

AT_ONCE = 256
"""Inputs of one HTTP request that are with schedulers at a time."""


class EmbeddingBatch:
    """States that share one wake-up, in the order of the inputs."""

    def __init__(self, place: RequestSlot) -> None:
        self.place = place
        self.wake = Wake()
        self.states: list[EmbeddingState] = []

    async def run(self, start: Callable[[EmbeddingState], None]) -> None:
        """Start every input and wait for its vector. Raises the ApiError of the first that fails."""
        waiting, running = deque(self.states), list[EmbeddingState]()
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                running.append(waiting.popleft())
                start(running[-1])
            await self.wake.wait()
            for state in running:
                if state.error is not None:
                    raise state.error
            running = [state for state in running if not state.done]

    @property
    def tokens(self) -> int:
        """Tokens of all inputs together."""
        return sum(state.prompt_tokens for state in self.states)

    @property
    def vectors(self) -> list[bytes]:
        """The vector of each input, once `run` has returned."""
        return [state.vector for state in self.states]
