"""Planner, which selects the tokens and choices that the next step computes."""

from collections.abc import Collection, Iterable
from itertools import filterfalse, islice

from tercet.protocol.messages.values import Grammar, LoRAAdapter
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.counters import CoreCounters
from tercet.scheduler.core.encodings import Encodings
from tercet.scheduler.core.events import (
    AdapterPending,
    AdapterRead,
    GrammarPending,
    GrammarRead,
    MaskReady,
    Obstacle,
    PeerBlocked,
    PeerDrained,
)
from tercet.scheduler.core.memory import KVMemory
from tercet.scheduler.core.pipeline_stages import PipelineStages
from tercet.scheduler.core.places.choice_places import planned_audio
from tercet.scheduler.core.plan import PageCopy, Plan, Row, SlotInit
from tercet.scheduler.core.plan_builder import PlanBuilder, TenantShare, token_cost
from tercet.scheduler.core.request import Req
from tercet.scheduler.core.retraction import PageShares, next_to_retract, sitting_out
from tercet.scheduler.core.speculation.ngram_drafter import Drafter
from tercet.scheduler.core.waiting.fair_share import SlotShares
from tercet.scheduler.core.waiting.in_flight_prefixes import InFlightPrefixes
from tercet.scheduler.core.waiting.policy import LONGEST_MEASURED
from tercet.scheduler.core.waiting.queue import WaitingQueue

RESERVE_DECAY = 0.998
RESERVE_RISE = 0.1
MAX_RESERVED_OUTPUT = 4096
"""Maximum output tokens of one choice for which admission reserves pages."""
FEW = 4
"""Choices that wait for a result sit out while they are at most 1 / FEW of all.

If they are more, planning waits: a step of half a batch costs almost as much as one of the whole.
"""


class Planner:
    """Fills one token budget a step: running decodes, then running prefills, then waiting choices."""

    def __init__(self, config: CoreConfig, memory: KVMemory, waiting: WaitingQueue, counters: CoreCounters) -> None:
        self._config = config
        self._memory = memory
        self._waiting = waiting
        self._counters = counters
        self._drafter = Drafter(config, memory.cache)
        self._budget = max(config.token_budget, len(memory.free_slots))
        self._share = TenantShare.of(max(1, self._budget // config.protection))
        self._reserve = config.reserve
        self.encodings = Encodings()
        self.stages = PipelineStages(config.stages)
        self.running: dict[Req, None] = {}
        self.blocked_peers: set[str] = set()
        self.pending_grammars: set[Grammar] = set()
        self.pending_adapters: set[LoRAAdapter] = set()
        self.closed = False
        """If set, only choices with output are planned; others wait for other weights."""
        self.shared = False
        """If set, other attention ranks may run choices beside these, and no exclusive one is admitted."""

    def plan(self, step: int, now: float) -> tuple[Plan, list[Req]] | None:
        """Return the next step, or None if there is nothing to compute, or if waiting for a result is better."""
        if not self.stages.several and self._awaiting() * FEW > len(self.running):
            return None
        builder = PlanBuilder(self._budget, self._share, now, waits=self.stages.several)
        shares, scarce, yielding = self._make_way()
        starved = self._plan_decodes(
            builder, step, {*yielding, *sitting_out(self.running, self._share.of_decodes, step, self.is_blocked)}
        )
        reserved = len(starved)
        builder.budget -= reserved
        starved += self._plan_extends(builder, step)
        builder.budget += reserved
        if starved:
            self._retract_for(starved, builder, step)
        if self._waiting and (scarce or not (starved and builder.rows)):
            self._admit(builder, step, shares, scarce=scarce)
        builder.give_back()
        while not (builder.rows or builder.introduce) and (victim := self._blocked_victim()):
            self.retract(victim)
            self._admit(builder, step)
        encode = self.encodings.plan(step, self.running, busy=bool(builder.rows or builder.introduce))
        if not (builder.rows or builder.introduce or encode):
            return None
        memory = self._memory
        updates, memory.updates = memory.updates, []
        self._reserve = max(self._config.reserve_floor, self._reserve * RESERVE_DECAY)
        builder.add_to(self._counters)
        self._drafter.observe(builder, self.stages.in_flight)
        states = memory.states
        restores, snapshots = ([], []) if states is None else states.plan(step, builder.rows, builder.reqs)
        if memory.windows is not None:
            updates += memory.windows.plan(builder.rows, builder.reqs)
        plan = Plan(
            step=step,
            adapters=memory.places.pop_adapter_loads(),
            audio=memory.places.pop_audio_loads(),
            texts=memory.places.texts.pop_text_loads(),
            introduce=builder.introduce,
            pages=updates,
            copies=builder.copies,
            restores=restores,
            snapshots=snapshots,
            rows=builder.rows,
            draft_tokens=builder.draft_tokens,
            encode=encode,
        )
        return plan, builder.reqs

    def apply_availability(self, message: Obstacle) -> None:
        """Apply an event that blocks or unblocks choices."""
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
        """Return whether a choice's output cannot be sent now, or it waits for a grammar, an adapter or weights."""
        if req.detokenizer in self.blocked_peers:
            return True
        if req.slot >= 0:
            return False
        if self.closed and not req.output_tokens:
            return True
        return req.sampling.grammar in self.pending_grammars or req.adapter in self.pending_adapters

    def _make_way(self) -> tuple[PageShares | None, bool, Collection[Req]]:
        """Let tenants above their share of the pages yield some to those within it, if pages are short.

        Returns the shares if pages are short, whether a waiting choice gets what they yield, and the choices that yield
        but are in a plan in flight: they are left out of this step and retracted in the next.
        """
        memory, running = self._memory, self.running
        most = memory.pools.total // 2 if self._waiting else len(running)  # a share, or a page for each
        shares = self._page_shares() if memory.available <= most else None
        if shares is None:
            return None, False, ()
        growing = [req for req in running if req.room <= req.length]
        pages = self._pages_due(shares)
        short = pages + len(growing) - memory.available
        if short <= 0 or not (pages or any(shares.may_grow(req.tenant) for req in growing)):
            return shares, False, ()
        if any(req.alone for req in running) or any(req.alone or req.hold for req in self._waiting):
            return shares, False, ()
        in_flight = set()
        for req in shares.yielding(running, short):
            if req.in_flight:
                in_flight.add(req)
            else:
                req.yielded = len(req.tokens)
                self.retract(req)
        return shares, pages > 0, in_flight

    def _page_shares(self) -> PageShares | None:
        """Return the shares of the pages; None if there is one tenant at most."""
        waiting = self._waiting.tenants.keys()
        if len({req.tenant for req in self.running} | waiting) < 2:
            return None
        return PageShares(self.running, waiting, self._memory.pools.total, self._expected_pages)

    def _pages_due(self, shares: PageShares) -> int:
        """Return the pages that the next waiting choices of tenants take, which stay within their shares with them."""
        memory = self._memory
        slots = SlotShares(self.running, memory, shares)
        tenants = {tenant for tenant in self._waiting.tenants if shares.may_grow(tenant) and slots.may_run(tenant)}
        pages = 0
        for req in self.line(tenants) if tenants else ():
            if req.tenant in tenants and not self.is_blocked(req) and memory.places.has_room(req):
                tenants.remove(req.tenant)
                pages += memory.pages_to_admit(req) if slots.is_due(req) else 0
                if not tenants:
                    break
        return pages

    def _plan_decodes(self, builder: PlanBuilder, step: int, left_out: Collection[Req]) -> list[Req]:
        """Add one token for every choice that has just one to compute; return those that found no page for it.

        Choices with more tokens are left to `_plan_extends`. Some choices are left out of this step.
        """
        starved = []
        blocked, rows, reqs = self.blocked_peers, builder.rows, builder.reqs
        most = self.stages.most_decodes(len(self.running))
        for req in self.running:
            length, computed = req.length, req.computed
            if (
                length <= computed
                or req.readable <= computed
                or (blocked and self.is_blocked(req))
                or (left_out and req in left_out)
            ):
                continue
            sample = length < req.end
            # mostly true, and cheaper than `has_work`
            goes_on = sample and req.finish is None and not (req.constrained or req.awaiting_result)
            if not goes_on:
                if not req.has_work:
                    continue
                req.awaiting_result = False
            if length > computed + 1:
                builder.extends.append(req)
            elif len(rows) < most and (req.room >= length or self._has_room(req)):
                rows.append(Row(req.slot, computed, 1, sample))
                reqs.append(req)
                req.computed = length
                if sample:
                    req.length = length + 1
                    req.awaiting_result = builder.waits
                req.in_flight += 1
                req.last_step = step
            elif len(rows) < most:
                starved.append(req)
        builder.decodes = len(builder.rows)
        builder.budget -= builder.decodes
        left = builder.budget - len(starved)
        if room := min(left // 2 if builder.extends else left, self._drafter.room(builder.decodes)):
            self._add_drafts(builder, room)
        return starved

    def _awaiting(self) -> int:
        """Return how many choices wait for a result; mark those whose drafter expects enough tokens to wait."""
        if self._drafter.room(len(self.running)):
            for req in self.running:
                if not self.is_blocked(req):  # `plan` can be called any number of times for a blocked choice
                    req.awaiting_result = self._drafter.waits_for(req) or req.awaiting_result
        return sum(req.blocked_on_result for req in self.running if req.constrained or req.awaiting_result)

    def _add_drafts(self, builder: PlanBuilder, room: int) -> None:
        """Add rows of draft tokens, `room` at most, shared evenly among the choices that decode."""
        asked = [req for req in builder.reqs if req.length == len(req.tokens) + 1]
        for left, req in zip(range(len(asked), 0, -1), asked, strict=True):
            tokens = self._drafter.guess(req, min(-(-room // left), req.end - req.length))
            count = min(len(tokens), self._spare_room(req, len(tokens)))
            if self._memory.states is not None and count:
                count = self._memory.states.draft(req, count)
            room -= builder.add_drafts(req, tokens[:count])

    def _spare_room(self, req: Req, wanted: int) -> int:
        """Return the tokens a choice has pages for beyond those it computes, after taking pages for up to `wanted`."""
        while req.room < req.computed + wanted and self._memory.available > len(self.running):
            if not self._memory.append_page(req):
                break
        return req.room - req.computed

    def _plan_extends(self, builder: PlanBuilder, step: int) -> list[Req]:
        """Continue choices with several tokens to compute: chunked prompts and forced tokens of grammars.

        Returns those that found no pages for forced tokens; a prompt has had its pages since admission.
        """
        if not builder.extends:
            return []
        starved = []
        others = len(builder.extends) + self._could_admit()
        for req in builder.extends:
            others -= 1
            needed = min(req.length, req.readable) - req.computed
            if builder.budget == 0:
                break
            if not builder.is_short(needed) or not builder.has_share(req.tenant, token_cost(req)):
                continue
            if not self._has_room(req):
                starved.append(req)
            elif others and needed > builder.budget:
                builder.hold_back(req, step, others)
            else:
                builder.add(req, step)
        return starved

    def _has_room(self, req: Req) -> bool:
        """Return whether a running choice has pages for all its known tokens, after taking available pages."""
        while req.room < req.length:
            if not self._memory.append_page(req):
                return False
        return True

    def _could_admit(self) -> bool:
        """Return whether a waiting choice could get a slot, and perhaps memory."""
        if not self._memory.free_slots:
            return False
        admissible = self._admissible(SlotShares(self.running, self._memory))
        return any(req.tenant in admissible and not self.is_blocked(req) for req in self._waiting)

    def _admissible(self, shares: SlotShares, builder: PlanBuilder | None = None) -> set[str]:
        """Return the tenants that wait and may take a slot, and have a share of the step that is built."""
        tenants = filter(shares.may_run, self._waiting.tenants)
        return {tenant for tenant in tenants if builder is None or builder.may_admit(tenant)}

    def _admit(
        self, builder: PlanBuilder, step: int, page_shares: PageShares | None = None, *, scarce: bool = False
    ) -> None:
        """Admit waiting choices in order, until budget, slots or memory are short.

        If a choice finds no pages, or if they are `scarce`, only choices of tenants without a slot or within their
        share of the pages may overtake it: at most `max_skips` times, and not if it was retracted, unless its tenant
        has other slots. A choice that finds no place for what it uses may be overtaken `max_skips` times.

        If some rows were held back, only short choices start, out of the first ones that wait. A choice whose prefix is
        being computed for another waits for it, while it was skipped less than `max_skips` times.
        """
        shares = SlotShares(self.running, self._memory, page_shares, scarce=scarce)
        admissible = self._admissible(shares, builder)
        if not (builder.budget and admissible):
            return
        shares.page_shares = pages = page_shares or self._page_shares()
        reserve = pages.reserve if pages else sum(self._expected_pages(req) for req in self.running)
        in_flight_prefixes = InFlightPrefixes(filterfalse(self.is_blocked, self.running), self._memory)
        alone = any(req.alone for req in self.running)
        admitted: list[Req] = []
        overtaken: list[Req] = []
        skipped: list[Req] = []
        put_off, places = 0, self._memory.places
        for req in islice(self.line(admissible), LONGEST_MEASURED if builder.held_back else None):
            if not builder.budget or put_off == LONGEST_MEASURED or not admissible:
                break
            if req.tenant not in admissible or self.is_blocked(req):
                continue
            if req.hold or (req.alone and self.shared) or (self.running and (req.alone or alone)):
                break
            if not places.has_room(req):
                if req.times_skipped >= self._config.max_skips:
                    break  # otherwise choices whose adapters and audio clips are loaded could take turns without end
                skipped.append(req)
                continue
            too_long = builder.held_back and not builder.is_short(self._memory.missing(req))
            if too_long or self._waits_for_prefix(req, in_flight_prefixes):
                skipped.append(req)
                put_off += 1
                continue
            copies = self._take_memory(req, shares, reserve)
            if copies is None:
                if not shares.may_overtake(req, self._config.max_skips):
                    break
                shares.mark_scarce()
                admissible &= self._admissible(shares, builder) - {req.tenant}
                skipped.append(req)
                continue
            shares.took(req)
            in_flight_prefixes.add(req, lambda: islice(self.line(), LONGEST_MEASURED))
            self._introduce(req, copies, builder, step)
            admitted.append(req)
            overtaken += skipped
            skipped.clear()
            alone = req.alone
            reserve += self._expected_pages(req)
            admissible = self._admissible(shares, builder)
        if admitted:
            self._waiting.count_skips(admitted, overtaken)

    def _take_memory(self, req: Req, shares: SlotShares, reserve: int) -> list[PageCopy] | None:
        """Give a waiting choice a slot and pages; see `KVMemory.admit`. `reserve` pages are for running choices."""
        if shares.is_passed_over(req):
            return None
        kept = shares.kept_pages(req, self._expected_pages(req), reserve)
        return self._memory.admit(req, kept if self.running else 0)

    def _waits_for_prefix(self, req: Req, in_flight_prefixes: InFlightPrefixes) -> bool:
        """Return whether a waiting choice is put off for a running prompt with the same prefix."""
        if not self._config.radix_cache or req.times_skipped >= self._config.max_skips:
            return False
        return in_flight_prefixes.is_worth_waiting(req, self._memory.cache)

    def line(self, tenants: Collection[str] | None = None) -> Iterable[Req]:
        """Return the waiting choices of some tenants, or of all, in the order of admission.

        An unblocked choice that was offered exclusive use of the scheduler is returned alone.
        """
        offered = [req for req in self._waiting if req.offered and not self.is_blocked(req)]
        return offered or self._waiting.in_order(self._memory.cache, tenants)

    def _introduce(self, req: Req, copies: list[PageCopy], builder: PlanBuilder, step: int) -> None:
        self._waiting.admit(req)
        self.running[req] = None
        if req.cached < 0:
            req.cached = min(req.computed, req.prompt_tokens)
            req.waited = builder.now - req.arrived
            self._counters.prompt_tokens += req.prompt_tokens
            self._counters.cached_tokens += req.cached
        self._counters.forks += req.leader is not None and req.leader.slot >= 0 and req.computed > 0
        self._counters.copies += len(copies)
        self.encodings.introduce(req, step)
        req.leader = None
        builder.copies += copies
        builder.admitted.add(req.tenant)
        builder.introduce.append(
            SlotInit(
                slot=req.slot,
                tokens=req.ids(),
                prompt_tokens=req.prompt_tokens,
                choice=req.index,
                sampling=req.sampling,
                suppressed_ids=sorted(req.stop_ids) if req.sampling.min_new_tokens else [],
                top_logprobs=-1 if req.logprobs is None else req.logprobs.top,
                prompt_logprobs=req.to_score,
                adapter=req.adapter_slot,
                request=req.request,
                images=req.images.planned if req.images else [],
                audio=planned_audio(req),
                text=req.text_place,
            )
        )
        builder.add(req, step)

    def _expected_pages(self, req: Req) -> int:
        """Return the number of pages that a choice will probably still request."""
        tokens = min(req.end - len(req.tokens), MAX_RESERVED_OUTPUT) * self._reserve
        return self._memory.pages_for(int(tokens))

    def _retract_for(self, starved: list[Req], builder: PlanBuilder, step: int) -> None:
        """Retract choices of the tenant with the most pages until each of the remaining ones has a page.

        Among a tenant's choices, those that cost least to recompute go first. Only choices that no plan in flight names
        can be retracted. While others make progress, a starved one rather sits out; before it, blocked ones go.
        """
        self._reserve = min(1.0, self._reserve + RESERVE_RISE)
        for req in starved:
            while req.slot >= 0 and not self._has_room(req):
                victim = next_to_retract(self.running)
                if victim is req:
                    sits_out = any(other.in_flight for other in self.running)
                    victim = None if sits_out else next_to_retract(filter(self.is_blocked, self.running)) or req
                if victim is None:
                    break
                self.retract(victim)
            else:
                if req.slot >= 0 and builder.budget:
                    builder.add(req, step)

    def _blocked_victim(self) -> Req | None:
        """Return the cheapest choice of a blocked peer if waiting choices need its memory and nothing else runs."""
        if not self.blocked_peers or any(req.in_flight for req in self.running):
            return None
        if all(self.is_blocked(req) for req in self._waiting):
            return None
        return next_to_retract(req for req in self.running if self.is_blocked(req))

    def retract(self, req: Req) -> None:
        """Take slot and pages from a running choice, and let it wait again.

        It later recomputes the tokens that the prefix cache has lost by then.
        """
        del self.running[req]
        self._memory.release(req)
        self._waiting.add(req, first=True)
        self._counters.retractions += 1
