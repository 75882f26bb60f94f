"""`Planner`: which tokens of which choices the next step computes."""

from collections.abc import Collection, Iterable
from itertools import islice

from tercet.protocol.messages.values import Grammar, LoRAAdapter
from tercet.scheduler.core.config import (
    AdapterPending,
    AdapterRead,
    CoreConfig,
    GrammarPending,
    GrammarRead,
    MaskReady,
    Obstacle,
    PeerBlocked,
    PeerDrained,
)
from tercet.scheduler.core.counters import CoreCounters
from tercet.scheduler.core.in_batch_prefixes import InFlightPrefixes
from tercet.scheduler.core.memory import KVMemory
from tercet.scheduler.core.plan import PageCopy, Plan, Row, SlotInit
from tercet.scheduler.core.plan_builder import PlanBuilder
from tercet.scheduler.core.policy import LONGEST_MEASURED
from tercet.scheduler.core.queue import WaitingQueue
from tercet.scheduler.core.request import Req
from tercet.scheduler.core.slot_shares import SlotShares
from tercet.scheduler.core.speculation.ngram_drafter import Drafter

RESERVE_DECAY = 0.998
RESERVE_RISE = 0.1
LONGEST_FORESEEN = 4096
"""Output tokens of one choice that admission sets pages aside for, at most."""

FEW = 4
"""Choices that wait for a result sit out while they are at most one in so many. If they are more, everybody waits: a
step of half a batch costs almost as much as one of the whole."""


class Planner:
    """Fills one token budget a step: running decodes, then running prefills, then waiting choices."""

    def __init__(self, config: CoreConfig, memory: KVMemory, waiting: WaitingQueue, counters: CoreCounters) -> None:
        self._config = config
        self._memory = memory
        self._waiting = waiting
        self._counters = counters
        self._drafter = Drafter(config, memory.cache)
        self._budget = max(config.token_budget, len(memory.free_slots))
        self._reserve = config.reserve
        self.running: dict[Req, None] = {}
        self.blocked_peers: set[str] = set()
        self.pending_grammars: set[Grammar] = set()
        self.pending_adapters: set[LoRAAdapter] = set()
        self.closed = False
        """Whether only choices that have output go on: what has none waits for other weights."""

    def plan(self, step: int, now: float) -> tuple[Plan, list[Req]] | None:
        """The next step, or None when there is nothing to compute, or when it is better to wait for a result."""
        if self._awaiting() * FEW > len(self.running):
            return None
        forming = PlanBuilder(self._budget, now)
        starved = self._plan_decodes(forming, step)
        reserved = len(starved)
        forming.budget -= reserved
        starved += self._plan_extends(forming, step)
        forming.budget += reserved
        if starved:
            self._relieve(starved, forming, step)
        if self._waiting and not (starved and forming.rows):
            self._admit(forming, step)
        forming.give_back()
        while not forming.rows and (victim := self._obstacle()):
            self.retract(victim)
            self._admit(forming, step)
        if not forming.rows:
            return None
        memory = self._memory
        updates, memory.updates = memory.updates, []
        loads, memory.adapters.loads = memory.adapters.loads, []
        self._reserve = max(self._config.reserve_floor, self._reserve * RESERVE_DECAY)
        forming.tell(self._counters)
        plan = Plan(
            step=step,
            adapters=loads,
            introduce=forming.introduce,
            pages=updates,
            copies=forming.copies,
            rows=forming.rows,
            assumed=forming.assumed,
        )
        return plan, forming.reqs

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
            case MaskReady(slot, step):
                for req in self.running:
                    if req.slot == slot and req.late == step:
                        req.late = -1
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

    def _plan_decodes(self, forming: PlanBuilder, step: int) -> list[Req]:
        """One token for every choice that has just one to compute; returns those that found no page for it.

        Leaves to `_plan_extends` those that have more.
        """
        starved = []
        blocked, rows, reqs = self.blocked_peers, forming.rows, forming.reqs
        for req in self.running:
            length, computed = req.length, req.computed
            if length <= computed or (blocked and self.is_blocked(req)):
                continue
            sample = length < req.end
            goes_on = sample and req.finish is None and not (req.guided or req.unsure)  # most do: quicker than to ask
            if not goes_on:
                if not req.has_work:
                    continue
                req.unsure = False
            if length > computed + 1:
                forming.extends.append(req)
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
        forming.decodes = len(forming.rows)
        forming.budget -= forming.decodes
        left = forming.budget - len(starved)
        if room := min(left // 2 if forming.extends else left, self._drafter.room(forming.decodes)):
            self._assume(forming, room)
        return starved

    def _awaiting(self) -> int:
        """How many choices wait for a result. Makes those `unsure` of which the drafter expects enough to wait."""
        if self._drafter.room(len(self.running)):
            for req in self.running:
                if not self.is_blocked(req):  # for which `plan` can be asked any number of times
                    req.unsure = self._drafter.waits_for(req) or req.unsure
        return sum(req.awaits_result for req in self.running if req.guided or req.unsure)

    def _assume(self, forming: PlanBuilder, room: int) -> None:
        """Add rows of guessed tokens, `room` at most, shared evenly among the choices that decode."""
        asked = [req for req in forming.reqs if req.length == len(req.tokens) + 1]
        for left, req in zip(range(len(asked), 0, -1), asked, strict=True):
            tokens = self._drafter.guess(req, min(-(-room // left), req.end - req.length))
            room -= forming.assume(req, tokens[: self._spare_room(req, len(tokens))])

    def _spare_room(self, req: Req, wanted: int) -> int:
        """Tokens a choice has pages for beyond those it computes, after taking spare pages for up to `wanted`."""
        while req.room < req.computed + wanted and self._memory.available > len(self.running):
            if not self._memory.grow(req):
                break
        return req.room - req.computed

    def _plan_extends(self, forming: PlanBuilder, step: int) -> list[Req]:
        """Go on with what needs several tokens: prompts that were cut into chunks, and what grammars forced.

        Returns those that found no pages for it; a prompt has had its own since admission.
        """
        if not forming.extends:
            return []
        starved = []
        others = len(forming.extends) + self._could_admit()
        for req in forming.extends:
            others -= 1
            needed = req.length - req.computed
            if forming.budget == 0:
                break
            if not forming.is_short(needed):
                continue
            if not self._has_room(req):
                starved.append(req)
            elif others and needed > forming.budget:
                forming.hold_back(req, step, others)
            else:
                forming.add(req, step)
        return starved

    def _has_room(self, req: Req) -> bool:
        """Whether a running choice has pages for all its known tokens, once it got those that could be had."""
        while req.room < req.length:
            if not self._memory.grow(req):
                return False
        return True

    def _could_admit(self) -> bool:
        """Whether there is a slot for somebody who waits, and may be memory."""
        if not self._memory.free_slots:
            return False
        admissible = self._admissible(SlotShares(self.running, self._memory))
        return any(req.tenant in admissible and not self.is_blocked(req) for req in self._waiting)

    def _admissible(self, shares: SlotShares) -> set[str]:
        """Return the tenants that wait and may take a slot."""
        return {tenant for tenant in self._waiting.tenants if shares.may_run(tenant)}

    def _admit(self, forming: PlanBuilder, step: int) -> None:
        """Let waiting choices in, in order, until budget, slots or memory are short.

        A new choice that finds no pages lets only those go by whose tenant has no slot, until its patience is at an
        end. One that was retracted lets nobody go by.
        Whose adapter finds no place is passed over, until its patience is at an end.

        Beside those that were held back only the short ones start, of the first that wait. Whose beginning is just
        being computed for another waits for it, until its patience is at an end, too.
        """
        admitted: list[Req] = []
        overtaken: list[Req] = []
        skipped: list[Req] = []
        put_off = 0
        shares = SlotShares(self.running, self._memory)
        admissible = self._admissible(shares)
        if forming.budget and admissible:
            reserve = sum(self._foreseen(req) for req in self.running)
            coming = self._coming_prefixes()
            alone = any(req.alone for req in self.running)
            for req in islice(self.line(admissible), LONGEST_MEASURED if forming.held_back else None):
                if forming.budget == 0 or put_off == LONGEST_MEASURED or not admissible:
                    break
                if req.tenant not in admissible or self.is_blocked(req):
                    continue
                if req.hold or (self.running and (req.alone or alone)):
                    break
                if not self._memory.adapters.has_room(req.adapter):
                    if req.passed_over >= self._config.patience:
                        break  # or those whose adapters are at hand could take turns for ever
                    skipped.append(req)
                    continue
                if forming.held_back and not forming.is_short(self._memory.missing(req)):
                    skipped.append(req)
                    continue
                if self._finds_more_later(req, coming):
                    skipped.append(req)
                    put_off += 1
                    continue
                kept = reserve + self._foreseen(req) + shares.kept_pages(req.tenant)
                copies = self._memory.admit(req, kept if self.running else 0)
                if copies is None:
                    if not req.tenant or req.output_tokens or req.passed_over >= self._config.patience:
                        break
                    shares.only_newcomers()
                    admissible = self._admissible(shares) - {req.tenant}
                    skipped.append(req)
                    continue
                shares.took(req)
                self._introduce(req, copies, forming, step)
                admitted.append(req)
                overtaken += skipped
                skipped.clear()
                alone = req.alone
                coming.add(req)
                reserve += self._foreseen(req)
                admissible = self._admissible(shares)
        if admitted:
            self._waiting.count_passed_over(admitted, overtaken)

    def _coming_prefixes(self) -> InFlightPrefixes:
        """Prompts that are being computed, by choices that nothing holds up."""
        return InFlightPrefixes((req for req in self.running if not self.is_blocked(req)), self._memory.page_size)

    def _finds_more_later(self, req: Req, coming: InFlightPrefixes) -> bool:
        """Whether a waiting choice is put off for a prompt that begins as its own."""
        if not self._config.radix_cache or req.passed_over >= self._config.patience:
            return False
        return coming.is_worth_waiting(req, self._memory.cache)

    def line(self, tenants: Collection[str] | None = None) -> Iterable[Req]:
        """Return the waiting choices of some tenants, or of all, in the order in which they should be admitted.

        One to which the scheduler was offered has it to itself, unless it is held up.
        """
        offered = [req for req in self._waiting if req.offered and not self.is_blocked(req)]
        return offered or self._waiting.in_order(self._memory.cache, tenants)

    def _introduce(self, req: Req, copies: list[PageCopy], forming: PlanBuilder, step: int) -> None:
        self._waiting.admit(req)
        self.running[req] = None
        if req.cached < 0:
            req.cached = min(req.computed, req.prompt_tokens)
            req.waited = forming.now - req.arrived
            self._counters.prompt_tokens += req.prompt_tokens
            self._counters.cached_tokens += req.cached
        self._counters.forks += req.leader is not None and req.leader.slot >= 0 and req.computed > 0
        self._counters.copies += len(copies)
        req.leader = None
        logprobs = req.logprobs
        forming.copies += copies
        forming.introduce.append(
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
                request=req.request,
            )
        )
        forming.add(req, step)

    def _foreseen(self, req: Req) -> int:
        """Pages a choice will probably still ask for."""
        tokens = min(req.end - len(req.tokens), LONGEST_FORESEEN) * self._reserve
        return self._memory.pages_for(int(tokens))

    def _relieve(self, starved: list[Req], forming: PlanBuilder, step: int) -> None:
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
                if req.slot >= 0 and forming.budget:
                    forming.add(req, step)

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
