"""`DraftVerifier`: which of the tokens that a plan assumed have come true."""

from collections import Counter
from collections.abc import Mapping, Sequence

from tercet.scheduler.core.plan import Row
from tercet.scheduler.core.request import Req


class DraftVerifier:
    """The guesses of one plan. Ask `holds` for its rows in order, each once the tokens of earlier rows are in `Req`."""

    def __init__(self, assumed: Mapping[int, int], reqs: Sequence[Req]) -> None:
        self._assumed = assumed
        self._drafted = Counter(reqs[index] for index in assumed)
        self._right: Counter[Req] = Counter()
        self._wrong: set[Req] = set()
        self.rows = {index for index, req in enumerate(reqs) if req in self._drafted} if assumed else set()
        """All rows of choices for which something was assumed."""

    def holds(self, index: int, row: Row, req: Req) -> bool:
        """Whether all tokens assumed up to this row were sampled; if so, its own is counted as computed."""
        if index not in self._assumed:
            return True
        if req in self._wrong or len(req.tokens) != row.start + 1 or req.tokens[row.start] != self._assumed[index]:
            self._wrong.add(req)  # and all that builds on it, though a token that is forced may be as assumed again
            return False
        self._right[req] += 1
        req.computed += 1
        req.length += 1
        return True

    def learn(self) -> int:
        """Let choices know how well they were guessed; returns how many tokens were right."""
        for req, drafted in self._drafted.items():
            req.drafting.learn(drafted, self._right[req])
        return self._right.total()
