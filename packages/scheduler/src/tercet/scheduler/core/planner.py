"""`Planner`: which tokens of which choices the next step computes."""

from tercet.protocol.values import Grammar, LoRAAdapter
from tercet.scheduler.core.coming_prefixes import ComingPrefixes
from tercet.scheduler.core.config import (
    AdapterPending,
    AdapterRead,
    CoreConfig,
    GrammarPending,
    GrammarRead,
    Obstacle,
    PeerBlocked,
    PeerDrained,
)
from tercet.scheduler.core.counters import Counters
from tercet.scheduler.core.memory import KVMemory
from tercet.scheduler.core.plan import PageCopy, Plan, Row, SlotInit
from tercet.scheduler.core.policy import LONGEST_MEASURED
from tercet.scheduler.core.queue import WaitingQueue
from tercet.scheduler.core.request import Req

RESERVE_DECAY = 0.998
RESERVE_RISE = 0.1
LONGEST_FORESEEN = 4096
"""Output tokens of one choice that admission sets pages aside for, at most."""

FEW = 4
"""Choices that wait for a result sit out while they are at most one in so many. If they are more, everybody waits: a
step of half a batch costs almost as much as one of the whole."""


class Draft:
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


class Planner:
    """Fills one token budget a step: running decodes, then running prefills, then waiting choices."""

    def __init__(self, config: CoreConfig, memory: KVMemory, waiting: WaitingQueue, counters: Counters) -> None:
        self._config = config
        self._memory = memory
        self._waiting = waiting
        self._counters = counters
        self._budget = max(config.token_budget, len(memory.free_slots))
        self._reserve = config.reserve
        self.running: dict[Req, None] = {}
        self.blocked_peers: set[str] = set()
        self.pending_grammars: set[Grammar] = set()
        self.pending_adapters: set[LoRAAdapter] = set()
        self.closed = False
        """Whether only choices that have output go on: what has none waits for other weights."""

    def plan(self, step: int) -> tuple[Plan, list[Req]] | None:
        """The next step, or None when there is nothing to compute, or when it is better to wait for a result."""
        awaiting = [req for req in self.running if req.guided and req.awaits_result]
        if len(awaiting) * FEW > len(self.running):
            return None
        draft = Draft(self._budget)
        starved = self._plan_decodes(draft, step)
        reserved = len(starved)
        draft.budget -= reserved
        starved += self._plan_extends(draft, step)
        draft.budget += reserved
        if starved:
            self._relieve(starved, draft, step)
        if self._waiting and not (starved and draft.rows):
            self._admit(draft, step)
        draft.give_back()
        while not draft.rows and (victim := self._obstacle()):
            self.retract(victim)
            self._admit(draft, step)
        if not draft.rows:
            return None
        memory = self._memory
        updates, memory.updates = memory.updates, []
        loads, memory.adapters.loads = memory.adapters.loads, []
        self._reserve = max(self._config.reserve_floor, self._reserve * RESERVE_DECAY)
        draft.tell(self._counters)
        plan = Plan(
            step=step,
            adapters=loads,
            introduce=draft.introduce,
            pages=updates,
            copies=draft.copies,
            rows=draft.rows,
        )
        return plan, draft.reqs

    def heed(self, message: Obstacle) -> None:
        """Leave out what is held up, or let it in again."""
        match message:
            case PeerBlocked(peer):
                self.blocked_peers.add(peer)
            case PeerDrained(peer):
                self.blocked_peers.discard(peer)
            case GrammarPending(grammar):
                self.pending_grammars.add(grammar)
            case GrammarRead(grammar=grammar):
                self.pending_grammars.discard(grammar)
            case AdapterPending(adapter):
                self.pending_adapters.add(adapter)
            case AdapterRead(adapter=adapter):
                self.pending_adapters.discard(adapter)

    def is_blocked(self, req: Req) -> bool:
        """Whether the output of a choice has nowhere to go now, or it waits for a grammar, an adapter or weights."""
        if req.detokenizer in self.blocked_peers:
            return True
        if req.slot >= 0:
            return False
        if self.closed and not req.output_tokens:
            return True
        return req.sampling.grammar in self.pending_grammars or req.adapter in self.pending_adapters

    def _plan_decodes(self, draft: Draft, step: int) -> list[Req]:
        """One token for every choice that has just one to compute; returns those that found no page for it.

        Leaves to `_plan_extends` those that have more.
        """
        starved = []
        blocked, rows, reqs = self.blocked_peers, draft.rows, draft.reqs
        for req in self.running:
            length, computed = req.length, req.computed
            if length <= computed or (blocked and self.is_blocked(req)):
                continue
            sample = length < req.end
            goes_on = sample and req.finish is None and not req.guided  # most do: quicker than to ask
            if not goes_on and not req.has_work:
                continue
            if length > computed + 1:
                draft.extends.append(req)
            elif req.room >= length or self._has_room(req):
                rows.append(Row(req.slot, computed, 1, sample))
                reqs.append(req)
                req.computed = length
                if sample:
                    req.length = length + 1
                req.in_flight += 1
                req.last_step = step
            else:
                starved.append(req)
        draft.decodes = len(draft.rows)
        draft.budget -= draft.decodes
        return starved

    def _plan_extends(self, draft: Draft, step: int) -> list[Req]:
        """Go on with what needs several tokens: prompts that were cut into chunks, and what grammars forced.

        Returns those that found no pages for it; a prompt has had its own since admission.
        """
        if not draft.extends:
            return []
        starved = []
        others = len(draft.extends) + self._could_admit()
        for req in draft.extends:
            others -= 1
            needed = req.length - req.computed
            if draft.budget == 0:
                break
            if not draft.is_short(needed):
                continue
            if not self._has_room(req):
                starved.append(req)
            elif others and needed > draft.budget:
                draft.hold_back(req, step, others)
            else:
                draft.add(req, step)
        return starved

    def _has_room(self, req: Req) -> bool:
        """Whether a running choice has pages for all its known tokens, once it got those that could be had."""
        while req.room < req.length:
            if not self._memory.grow(req):
                return False
        return True

    def _could_admit(self) -> bool:
        """Whether there is a slot for somebody who waits, and may be memory."""
        return bool(self._memory.free_slots) and any(not self.is_blocked(req) for req in self._waiting)

    def _admit(self, draft: Draft, step: int) -> None:
        """Let waiting choices in, in order, until budget, slots or memory are short. Nobody jumps a line for memory.

        Whose adapter finds no place is passed over, until its patience is at an end.

        Beside those that were held back only the short ones start, of the first that wait. Whose beginning is just
        being computed for another waits for it, until its patience is at an end, too.
        """
        admitted: list[Req] = []
        put_off = 0
        if draft.budget and self._memory.free_slots:
            reserve = sum(self._foreseen(req) for req in self.running)
            coming = self._coming_prefixes()
            for req in self.line()[: LONGEST_MEASURED if draft.held_back else None]:
                if draft.budget == 0 or put_off == LONGEST_MEASURED:
                    break
                if self.is_blocked(req):
                    continue
                if req.hold or (self.running and (req.alone or any(other.alone for other in self.running))):
                    break
                if not self._memory.adapters.has_room(req.adapter):
                    if req.passed_over >= self._config.patience:
                        break  # or those whose adapters are at hand could take turns for ever
                    continue
                if draft.held_back and not draft.is_short(self._memory.missing(req)):
                    continue
                if self._finds_more_later(req, coming):
                    put_off += 1
                    continue
                copies = self._memory.admit(req, reserve + self._foreseen(req) if self.running else 0)
                if copies is None:
                    break
                self._introduce(req, copies, draft, step)
                admitted.append(req)
                coming.add(req)
                reserve += self._foreseen(req)
        if admitted:
            self._waiting.count_passed_over(admitted)

    def _coming_prefixes(self) -> ComingPrefixes:
        """Prompts that are being computed, by choices that nothing holds up."""
        return ComingPrefixes((req for req in self.running if not self.is_blocked(req)), self._memory.page_size)

    def _finds_more_later(self, req: Req, coming: ComingPrefixes) -> bool:
        """Whether a waiting choice is put off for a prompt that begins as its own."""
        if not self._config.radix_cache or req.passed_over >= self._config.patience:
            return False
        return coming.is_worth_waiting(req, self._memory.cache)

    def line(self) -> list[Req]:
        """Who waits, in order; one to which the scheduler was offered has it to itself."""
        return [req for req in self._waiting if req.offered] or self._waiting.in_order(self._memory.cache)

    def _introduce(self, req: Req, copies: list[PageCopy], draft: Draft, step: int) -> None:
        self._waiting.remove(req)
        self.running[req] = None
        if req.cached < 0:
            req.cached = min(req.computed, req.prompt_tokens)
            self._counters.prompt_tokens += req.prompt_tokens
            self._counters.cached_tokens += req.cached
        self._counters.forks += req.leader is not None and req.leader.slot >= 0 and req.computed > 0
        self._counters.copies += len(copies)
        req.leader = None
        logprobs = req.logprobs
        draft.copies += copies
        draft.introduce.append(
            SlotInit(
                slot=req.slot,
                tokens=req.tokens.tobytes(),
                prompt_tokens=req.prompt_tokens,
                choice=req.index,
                sampling=req.sampling,
                suppressed_ids=sorted(req.stop_ids) if req.sampling.min_new_tokens else [],
                top_logprobs=-1 if logprobs is None else logprobs.top,
                prompt_logprobs=req.to_score,
                adapter=req.place,
            )
        )
        draft.add(req, step)

    def _foreseen(self, req: Req) -> int:
        """Pages a choice will probably still ask for."""
        tokens = min(req.end - len(req.tokens), LONGEST_FORESEEN) * self._reserve
        return self._memory.pages_for(int(tokens))

    def _relieve(self, starved: list[Req], draft: Draft, step: int) -> None:
        """Retract the choices that cost least to compute again, until everybody left has a page.

        Only choices that no plan names can go. While others make progress, a starved one rather sits out.
        """
        self._reserve = min(1.0, self._reserve + RESERVE_RISE)
        for req in starved:
            while req.slot >= 0 and not self._has_room(req):
                victim = self._cheapest()
                if victim is None or (victim is req and any(other.in_flight for other in self.running)):
                    break
                self.retract(victim)
            else:
                if req.slot >= 0 and draft.budget:
                    draft.add(req, step)

    def _cheapest(self) -> Req | None:
        return min((req for req in self.running if _is_idle(req)), key=_cost, default=None)

    def _obstacle(self) -> Req | None:
        """Of choices whose peer is blocked, the cheapest, if they hold what others wait for and nothing else moves."""
        if not self.blocked_peers or any(req.in_flight for req in self.running):
            return None
        if all(self.is_blocked(req) for req in self._waiting):
            return None
        return min((req for req in self.running if self.is_blocked(req) and _is_idle(req)), key=_cost, default=None)

    def retract(self, req: Req) -> None:
        """Take slot and pages from a running choice; it computes again later what the prefix cache has lost by then."""
        del self.running[req]
        self._memory.release(req)
        self._waiting.add(req, first=True)
        self._counters.retractions += 1


def _is_idle(req: Req) -> bool:
    """Whether it could give up its slot now."""
    return req.in_flight == 0 and req.finish is None


def _cost(req: Req) -> tuple[int, ...]:
    """Orders choices by what their retraction costs."""
    return req.priority, len(req.tokens), -req.arrival
