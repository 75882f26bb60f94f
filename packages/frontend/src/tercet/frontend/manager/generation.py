"""The requests one HTTP request became, and what arrives for them, as their consumer sees it."""

from collections.abc import AsyncIterator

import msgspec

from tercet.frontend.errors import ApiError
from tercet.frontend.manager.prediction import predicted_tokens
from tercet.frontend.manager.quota import RequestSlot
from tercet.frontend.manager.req_state import ReqState, Update
from tercet.frontend.routing.wake import Wake


class GenerationUpdate(msgspec.Struct, frozen=True):
    """News of one choice of the prompt numbered `prompt`."""

    prompt: int
    update: Update


class Generation:
    """States that share one wake-up: whoever consumes them takes everything new at once."""

    def __init__(self, place: RequestSlot) -> None:
        self.place = place
        self.wake = Wake()
        self.states: list[ReqState] = []

    def tell_ends(self) -> None:
        """From now on news is what a choice said until it ended: for whoever does nothing with a part of it."""
        for state in self.states:
            state.tells_ends = True

    async def arrivals(self) -> AsyncIterator[list[GenerationUpdate]]:
        """Non-empty lists until every request has its final answer. Raises the ApiError of one that failed."""
        while True:
            await self.wake.wait()
            news: list[GenerationUpdate] = []
            error: ApiError | None = None
            done = True
            for prompt, state in enumerate(self.states):
                news += [GenerationUpdate(prompt, update) for update in state.take()]
                # What happens while the consumer has the news belongs to the next round.
                error, done = error or state.error, done and state.done
            if news:
                yield news
            if error is not None:
                raise error
            if done:
                return

    @property
    def prompt_tokens(self) -> int:
        """Each prompt counted once, however many choices it has."""
        return sum(state.prompt_tokens for state in self.states)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose keys and values were still there."""
        return sum(state.cached_tokens for state in self.states)

    @property
    def output_tokens(self) -> int:
        """Tokens emitted over all prompts and choices."""
        return sum(state.output_tokens for state in self.states)

    def prediction_tokens(self) -> tuple[int, int] | None:
        """Predicted tokens that are in the answers, and that are not; None where nothing was predicted."""
        pairs = [(state.prediction, choice) for state in self.states if state.prediction for choice in state.choices]
        if not pairs:
            return None
        accepted = sum(predicted_tokens(prediction, choice.token_ids) for prediction, choice in pairs)
        return accepted, sum(len(prediction) for prediction, _ in pairs) - accepted
