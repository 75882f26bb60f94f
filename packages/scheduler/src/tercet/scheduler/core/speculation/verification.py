"""Verification of a plan's draft tokens."""

from collections import Counter
from collections.abc import Mapping, Sequence

from tercet.scheduler.core.plan import Row
from tercet.scheduler.core.request import Req


class DraftVerifier:
    """Draft tokens of one plan.

    Call `holds` for its rows in order, after the tokens of earlier rows were added to `Req`.
    """

    def __init__(self, draft_tokens: Mapping[int, int], reqs: Sequence[Req]) -> None:
        self._draft_tokens = draft_tokens
        self._drafted = Counter(reqs[index] for index in draft_tokens)
        self._right: Counter[Req] = Counter()
        self._wrong: set[Req] = set()
        self.rows = {index for index, req in enumerate(reqs) if req in self._drafted} if draft_tokens else set()
        """All rows of choices with draft tokens."""

    def holds(self, index: int, row: Row, req: Req) -> bool:
        """Return whether all draft tokens up to this row were sampled; if so, count the row's own token as computed."""
        if index not in self._draft_tokens:
            return True
        if req in self._wrong or len(req.tokens) != row.start + 1 or req.tokens[row.start] != self._draft_tokens[index]:
            self._wrong.add(req)  # and all later rows, even if a forced token happens to equal a later draft token
            return False
        self._right[req] += 1
        req.computed += 1
        req.length += 1
        return True

    def learn(self) -> int:
        """Update each choice's acceptance rate; return the total number of accepted tokens."""
        for req, drafted in self._drafted.items():
            req.drafting.learn(drafted, self._right[req])
        return self._right.total()
