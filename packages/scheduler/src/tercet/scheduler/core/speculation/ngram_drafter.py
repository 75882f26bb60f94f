"""`Drafter`: guesses tokens of choices, so that one step checks several of them (speculative decoding).

Which token comes next is a function of what comes before it, its position and the seed, so a guess needs no rule of
acceptance: it is right if it is the token that is sampled. What a choice says is what it would have said without.

A step that computes few rows takes as long as one that computes a few more, for it waits for the same weights. So steps
are filled up to so many rows, and where as many choices run there is nothing to gain and nothing is guessed.
"""

from array import array
from collections.abc import Sequence

from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.prefix_cache import PrefixCache
from tercet.scheduler.core.request import Req
from tercet.scheduler.core.speculation.draft_policy import TOKEN, recurrence

WORTH_WAITING = 2
"""So many tokens must be guessed for a choice to wait for its last result rather than be planned ahead of it."""


class Drafter:
    """Guesses by what senders predict, by what followed the same tokens in the prefix cache, or by recurrence."""

    def __init__(self, config: CoreConfig, cache: PrefixCache) -> None:
        self._rows = config.draft_rows
        self._cache = cache

    def room(self, rows: int) -> int:
        """How many rows may be added to those of a step for guesses."""
        return max(0, self._rows - rows)

    def waits_for(self, req: Req) -> bool:
        """Whether a choice should wait for the one token in flight, for `WORTH_WAITING` tokens are expected from it on.

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
        """The next tokens of a choice whose tokens are all known, `room` at most."""
        return () if req.drafting.pause else self._expected(req, min(req.drafting.width, room))

    def _expected(self, req: Req, most: int) -> Sequence[int]:
        if most <= 0:
            return ()
        text = req.tokens.tobytes()
        prediction = req.drafting.prediction
        found = prediction.rest(text[req.prompt_tokens * TOKEN :], most) if prediction else b""
        found = found or self._cache.upcoming(req.salt, text, most) or recurrence(text, most)
        return array("i", found)
