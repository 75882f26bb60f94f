"""Drafter of tokens, several of which one step verifies (speculative decoding).

The next token is a function of the tokens before it, its position and the seed, so a draft token needs no acceptance
rule: it is accepted if it is the token that is sampled. The output is the same as without speculation.

A step of few rows takes as long as one of a few more, because it waits for the same weights. Steps are therefore filled
up to a number of rows. If as many choices run, there is nothing to gain, and no token is drafted.
"""

from array import array
from collections.abc import Sequence

from tercet.scheduler.core.cache.prefix_cache import PrefixCache
from tercet.scheduler.core.request import Req
from tercet.scheduler.core.speculation.draft_policy import TOKEN, recurrence

WORTH_WAITING = 2
"""Minimum draft tokens for which a choice waits for its last result rather than being planned ahead of it."""


class Drafter:
    """Drafts from a client's prediction, from continuations in the prefix cache, or by prompt lookup."""

    def __init__(self, rows: int, cache: PrefixCache) -> None:
        """Create a drafter that fills steps up to a number of rows."""
        self._rows = rows
        self._cache = cache

    def room(self, rows: int) -> int:
        """Return how many rows may be added to those of a step for draft tokens."""
        return max(0, self._rows - rows)

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
        return req.length == len(req.tokens) + 1 and len(self._expected(req, WORTH_WAITING)) >= WORTH_WAITING

    def guess(self, req: Req, room: int) -> Sequence[int]:
        """Return at most `room` draft tokens of a choice whose tokens are all known."""
        return () if req.drafting.pause else self._expected(req, min(req.drafting.width, room))

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
