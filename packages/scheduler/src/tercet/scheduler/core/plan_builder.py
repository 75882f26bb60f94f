"""`PlanBuilder`: a plan in the making, and how long prompts and short ones share the tokens that a step has."""

from collections.abc import Sequence

from tercet.scheduler.core.counters import CoreCounters
from tercet.scheduler.core.plan import PageCopy, Row, SlotInit
from tercet.scheduler.core.request import Req


class PlanBuilder:
    """A plan in the making, and the choices behind its rows.

    A prompt that needs more tokens than a step has would keep everybody out until it is done. So while others wait, it
    is held back to half of the budget. The other half is for prompts of at most half its remaining length: each is
    done by the time at which the long one alone would have been. A longer one would not be, and waits: perhaps the
    prefix cache has its beginning by then. Budget that the short ones leave goes back to the long one.
    """

    def __init__(self, budget: int, now: float) -> None:
        self.budget = budget
        self.now = now
        self.rows: list[Row] = []
        self.reqs: list[Req] = []
        self.extends: list[Req] = []
        """Running choices that have more than one token to compute."""
        self.assumed: dict[int, int] = {}
        self.introduce: list[SlotInit] = []
        self.copies: list[PageCopy] = []
        self.decodes = 0
        """Rows of choices that had just one token to compute; all others come after them."""
        self.held_back: list[int] = []
        """Indices of rows that `hold_back` added: each may be lengthened by `give_back`."""
        self.shortest = 0
        """The least number of tokens that a choice held back needs."""

    def add(self, req: Req, step: int) -> None:
        """Plan as much of a choice as the budget allows, and sample if that reaches its last known token."""
        self._begin(req, step)
        self._lengthen(len(self.rows) - 1, self.budget)

    def assume(self, req: Req, tokens: Sequence[int]) -> int:
        """Add a decode row for each guessed token of a choice, behind its own row; returns their number.

        How many are right only the result says, so the choice is `unsure` and not planned again before.
        """
        for position, token in enumerate(tokens, start=req.computed):
            self.assumed[len(self.rows)] = token
            self.rows.append(Row(req.slot, position, 1, sample=True))
            self.reqs.append(req)
            req.in_flight += 1
            req.unsure = True
        self.budget -= len(tokens)
        return len(tokens)

    def hold_back(self, req: Req, step: int, others: int) -> None:
        """Plan at most half of the budget, less where `others` choices would not get a token each from the rest."""
        needed = req.length - req.computed
        self.shortest = min(self.shortest, needed) if self.held_back else needed
        self.held_back.append(len(self.rows))
        self._begin(req, step)
        self._lengthen(len(self.rows) - 1, max(1, min(self.budget // 2, self.budget - others)))

    def is_short(self, needed: int) -> bool:
        """Whether a choice that needs so many tokens can go beside those held back, each of which needs twice that."""
        return not self.held_back or 2 * needed <= self.shortest

    def give_back(self) -> None:
        """What is left of the budget is for those that were held back."""
        for index in self.held_back:
            if self.budget:
                self._lengthen(index, self.budget)

    def tell(self, counters: CoreCounters) -> None:
        """Add the finished plan to the counters."""
        longer = sum(row.count > 1 for row in self.rows[self.decodes :])
        counters.steps += 1
        counters.drafted_tokens += len(self.assumed)
        counters.mixed_steps += 0 < longer < len(self.rows)
        counters.chunks += sum(req.computed < req.prompt_tokens for req in self.reqs[self.decodes :])

    def _begin(self, req: Req, step: int) -> None:
        """Add a row of no tokens yet."""
        self.rows.append(Row(req.slot, req.computed, 0, sample=False))
        self.reqs.append(req)
        req.in_flight += 1
        req.last_step = step

    def _lengthen(self, index: int, most: int) -> None:
        """Give a row that does not sample yet the next tokens of its choice, `most` at the most."""
        row, req = self.rows[index], self.reqs[index]
        length = req.length
        count = min(length - req.computed, most)
        req.computed += count
        sample = req.computed == length and length < req.end
        self.rows[index] = Row(row.slot, row.start, row.count + count, sample)
        self.budget -= count
        if sample:
            req.length = length + 1
