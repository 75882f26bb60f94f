"""Drafter of tokens, several of which one step verifies (speculative decoding).

The next token is a function of the tokens before it, its position and the seed, so a draft token needs no acceptance
rule: it is accepted if it is the token that is sampled. The output is the same as without speculation.

A step of few rows takes as long as one of a few more, because it waits for the same weights. Steps are therefore filled
up to a number of rows. If as many choices run, there is nothing to gain, and no token is drafted. With `draft_by_cost`
steps are timed (`StepCosts`), and a choice drafts only as long as that pays.
"""

from array import array
from collections.abc import Sequence

from tercet.scheduler.core.cache.prefix_cache import PrefixCache
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.plan_builder import PlanBuilder
from tercet.scheduler.core.request import Req
from tercet.scheduler.core.speculation.draft_policy import TOKEN, recurrence
from tercet.scheduler.core.speculation.step_costs import StepCosts

WORTH_WAITING = 2
"""Minimum draft tokens for which a choice waits for its last result rather than being planned ahead of it."""


class Drafter:
    """Drafts from a client's prediction, from continuations in the prefix cache, or by prompt lookup."""

    def __init__(self, config: CoreConfig, cache: PrefixCache) -> None:
        """Create a drafter that fills steps up to a number of rows."""
        self._rows = config.draft_rows
        self._cache = cache
        self._costs = StepCosts() if config.draft_rows and config.draft_by_cost else None
        self._least_gain = 0.0
        """Accepted tokens that a choice must be expected to gain, in steps of as many choices as `room` was given."""

    def room(self, choices: int) -> int:
        """Return how many rows may be added to those of `choices` for draft tokens: 0 if no draft can pay."""
        room = max(0, self._rows - choices)
        if self._costs is not None and room:
            self._least_gain = self._costs.least_gain(choices)
        return 0 if room <= self._least_gain else room

    def observe(self, builder: PlanBuilder, in_flight: int) -> None:
        """Note a finished plan, and how many were in flight before it."""
        if self._costs is not None:
            drafts = len(builder.draft_tokens)
            alone = not builder.introduce and len(builder.rows) == builder.decodes + drafts
            choices = builder.decodes if alone else 0
            self._costs.observe(builder.now, choices, drafts=drafts > 0, in_flight=in_flight)

    def waits_for(self, req: Req) -> bool:
        """Return whether a choice should wait for the token in flight: at least `WORTH_WAITING` draft tokens follow it.

        Call it once for each plan: it counts down the steps of `DraftPolicy.pause`.
        """
        drafting = req.drafting
        if req.finish is not None:
            return False
        if drafting.pause:
            drafting.pause -= 1
            return False
        if drafting.gain(drafting.width) <= self._least_gain:
            drafting.forget()
            return False
        return req.length == len(req.tokens) + 1 and len(self._expected(req, WORTH_WAITING)) >= WORTH_WAITING

    def guess(self, req: Req, room: int) -> Sequence[int]:
        """Return at most `room` draft tokens of a choice whose tokens are all known."""
        drafting = req.drafting
        tokens = () if drafting.pause else self._expected(req, min(drafting.width, room))
        return tokens if drafting.gain(len(tokens)) > self._least_gain else ()

    def _expected(self, req: Req, most: int) -> Sequence[int]:
        if most <= 0:
            return ()
        text = req.tokens.tobytes()
        prediction = req.drafting.prediction
        found = prediction.rest(text[req.prompt_tokens * TOKEN :], most) if prediction else b""
        found = found or self._cache.upcoming(req.salt, text, most) or recurrence(text, most)
        drafts = array("i", found)
        image = next((place for place, token in enumerate(drafts) if token < 0), len(drafts))
        return drafts[:image]  # a key of an image is no token
