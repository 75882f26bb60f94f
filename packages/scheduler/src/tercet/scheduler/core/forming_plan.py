"""`FormingPlan`: a plan in the making, and how long prompts and short ones share the tokens that a step has."""

from collections.abc import Sequence

from tercet.scheduler.core.counters import Counters
from tercet.scheduler.core.plan import PageCopy, Row, SlotInit
from tercet.scheduler.core.request import Req


class FormingPlan:
    """A plan in the making, and the choices behind its rows.

    What needs more tokens than a step has would keep everybody out until it is done. So while others want some, it is
    held back to half of them, and who needs at most half of what it still needs goes beside it: with half of each step
    that is done no later than the long one alone would have been. Whoever needs more would not be, and waits: perhaps
    it finds a prompt like its own in the prefix cache then. What the short ones leave goes back to the long one.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
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
        """Rows that got less than the budget had."""
        self.shortest = 0
        """Tokens that the one of them that needs least needs."""

    def add(self, req: Req, step: int) -> None:
        """Plan as much of a choice as the budget allows, and sample if that reaches its last known token."""
        self._begin(req, step)
        self._lengthen(len(self.rows) - 1, self.budget)

    def assume(self, req: Req, tokens: Sequence[int]) -> int:
        """Plan tokens that may follow the one that a choice computes; returns their number.

        How far it gets is known only with the result, so nothing more can be planned for it before.
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
        """Plan half of what the budget allows, or less if each of the others would not find a token in the rest."""
        needed = req.length - req.computed
        self.shortest = min(self.shortest, needed) if self.held_back else needed
        self.held_back.append(len(self.rows))
        self._begin(req, step)
        self._lengthen(len(self.rows) - 1, max(1, min(self.budget // 2, self.budget - others)))

    def is_short(self, needed: int) -> bool:
        """Whether a choice that needs so many tokens may have some beside those that were held back."""
        return not self.held_back or 2 * needed <= self.shortest

    def give_back(self) -> None:
        """What is left of the budget is for those that were held back."""
        for index in self.held_back:
            if self.budget:
                self._lengthen(index, self.budget)

    def tell(self, counters: Counters) -> None:
        """Count what the plan has become."""
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
