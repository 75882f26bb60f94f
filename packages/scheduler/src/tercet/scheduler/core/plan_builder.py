"""A plan under construction: the rows of a step and their shares of its budget."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from tercet.protocol.messages.values import PrefillChunk
from tercet.scheduler.core.counters import CoreCounters
from tercet.scheduler.core.plan import PageCopy, Row, SlotInit
from tercet.scheduler.core.request import Req

SCORED_TOKEN = 4
"""Cost of a prompt token with log-probabilities in a tenant's share: it also needs the head and a sort of logits."""


class TenantShare(NamedTuple):
    """Tokens of a step for each tenant while another decodes."""

    tokens: int
    of_prompts: int
    """Those that decodes of the tenant leave to its prompts."""

    @property
    def of_decodes(self) -> int:
        """Return the most choices of the tenant that decode."""
        return max(1, self.tokens - self.of_prompts)

    @classmethod
    def of(cls, tokens: int) -> "TenantShare":
        """Return a share, of which a quarter is for prompts, or what a token with log-probabilities costs."""
        return cls(tokens, max(min(SCORED_TOKEN, tokens), tokens // 4))


class PlanBuilder:
    """A plan under construction, and the choices of its rows.

    A prompt that needs more tokens than a step has would block all others until it is done. While others wait, it is
    therefore held back to half of the budget. The other half is for prompts of at most half its remaining length: each
    is done by the time at which the long one alone would have been. A longer one would not be, and waits; the prefix
    cache may have its prefix by then. Budget that the short ones leave goes back to the long one.

    The gap between two tokens of a decoding choice is the time of a step, so the tokens of other tenants lengthen it.
    While choices of a tenant decode, each other tenant gets `share`, of which its own decodes leave a part to its
    prompts. A choice that is admitted gets at least one token; later it waits for its turn.
    """

    def __init__(self, budget: int, share: "TenantShare", now: float, *, waits: bool = False) -> None:
        """Begin a plan. A choice that samples `waits` for its result before it is planned again."""
        self.budget = budget
        self.waits = waits
        self.now = now
        self.rows: list[Row] = []
        self.reqs: list[Req] = []
        self.extends: list[Req] = []
        """Running choices that have more than one token to compute."""
        self.draft_tokens: dict[int, int] = {}
        self.introduce: list[SlotInit] = []
        self.copies: list[PageCopy] = []
        self.decodes = 0
        """Number of rows of choices that had just one token to compute; all other rows come after them."""
        self.held_back: list[int] = []
        """Indices of rows that `hold_back` added: `give_back` may lengthen them."""
        self.shortest = 0
        """Fewest tokens that a held-back choice needs."""
        self._tenant_share = share
        self._used: Counter[str] = Counter()
        """Cost of the tokens of each tenant."""
        self._decoding: set[str] | None = None
        self.admitted: set[str] = set()
        """Tenants of which a choice was admitted."""

    def add(self, req: Req, step: int) -> None:
        """Plan as much of a choice as it can read and the budget allows, and sample if that is all it knows."""
        if req.readable <= req.computed:
            return
        self._begin(req, step)
        self._lengthen(len(self.rows) - 1, self.budget)

    def add_drafts(self, req: Req, tokens: Sequence[int]) -> int:
        """Add a decode row for each draft token of a choice, behind its own row; return their number.

        The number of accepted ones is known only with the result, so the choice is not planned again before.
        """
        for position, token in enumerate(tokens, start=req.computed):
            self.draft_tokens[len(self.rows)] = token
            self.rows.append(Row(req.slot, position, 1, sample=True))
            self.reqs.append(req)
            req.in_flight += 1
            req.awaiting_result = True
        self.budget -= len(tokens)
        return len(tokens)

    def hold_back(self, req: Req, step: int, others: int) -> None:
        """Plan at most half of the budget, or less if `others` choices would not get a token each from the rest."""
        needed = req.length - req.computed
        self.shortest = min(self.shortest, needed) if self.held_back else needed
        self.held_back.append(len(self.rows))
        self._begin(req, step)
        self._lengthen(len(self.rows) - 1, max(1, min(self.budget // 2, self.budget - others)))

    def is_short(self, needed: int) -> bool:
        """Return whether a choice needing so many tokens fits beside the held-back ones, which need twice that."""
        return not self.held_back or 2 * needed <= self.shortest

    def has_share(self, tenant: str, cost: int = 1) -> bool:
        """Return whether a tenant may get another token of the step."""
        left = self._left(tenant)
        return left is None or left >= cost

    def may_admit(self, tenant: str) -> bool:
        """Return whether a choice of a tenant may be admitted: one in any step, so that its prompts block no others."""
        return tenant not in self.admitted or self.has_share(tenant)

    def give_back(self) -> None:
        """Give the rest of the budget to the rows that were held back."""
        for index in self.held_back:
            if self.budget:
                self._lengthen(index, self.budget)

    def add_to(self, counters: CoreCounters) -> None:
        """Add the finished plan to the counters."""
        longer = sum(row.count > 1 for row in self.rows[self.decodes :])
        counters.steps += 1
        counters.drafted_tokens += len(self.draft_tokens)
        counters.mixed_steps += 0 < longer < len(self.rows)
        counters.chunks += sum(req.computed < req.prompt_tokens for req in self.reqs[self.decodes :])
        for row, req in zip(self.rows[self.decodes :], self.reqs[self.decodes :], strict=True):
            if req.traced and not req.opened and row.start < req.prompt_tokens:
                req.chunks.append(PrefillChunk(at=self.now - req.arrived, tokens=row.count))

    def _begin(self, req: Req, step: int) -> None:
        """Add a row without tokens."""
        self.rows.append(Row(req.slot, req.computed, 0, sample=False))
        self.reqs.append(req)
        req.in_flight += 1
        req.last_step = step

    def _lengthen(self, index: int, most: int) -> None:
        """Extend a row that does not sample yet by at most `most` tokens of its choice."""
        row, req = self.rows[index], self.reqs[index]
        length = req.length
        count = min(min(length, req.readable) - req.computed, most, self._share(req, 0 if row.count else 1))
        if req.images is not None:
            count = req.images.chunk(req.computed, count)
        req.computed += count
        sample = req.computed == length and length < req.end
        self.rows[index] = Row(row.slot, row.start, row.count + count, sample)
        self.budget = max(0, self.budget - count)
        self._used[req.tenant] += count * token_cost(req)
        if sample:
            req.length = length + 1
            req.awaiting_result = self.waits

    def _share(self, req: Req, least: int) -> int:
        """Return how many tokens a choice may get of its tenant's share of the step, `least` or more."""
        left = self._left(req.tenant)
        return self.budget if left is None else max(least, left // token_cost(req))

    def _left(self, tenant: str) -> int | None:
        """Return the rest of a tenant's share; None while no other tenant decodes."""
        share = self._tenant_share
        if self._decoding is None:
            decodes = Counter(req.tenant for req in self.reqs[: self.decodes])
            self._decoding = set(decodes)
            self._used += Counter(
                {name: min(count, share.tokens - share.of_prompts) for name, count in decodes.items()}
            )
        if self._decoding <= {tenant}:
            return None
        return share.tokens - self._used[tenant]


def token_cost(req: Req) -> int:
    """Return the cost of one more prompt token of a choice."""
    return SCORED_TOKEN if req.to_score else 1
