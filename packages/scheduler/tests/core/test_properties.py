"""Anything may happen in any order: every open choice still gets its tokens and one final answer, and nothing is left.

Two frontends and two detokenizers, tiny memories, new requests, aborts, later attempts, duplicates, blocked peers,
pauses, flushes, lost frontends, logits that are not finite, grammars that force tokens and end outputs, suspects that
are held until nothing else runs, schedulers that die and leave everything to another. Results come late. All invariants
are checked after every call, and every plan comes out of the log as it was made.
"""

import io
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packages.protocol.tests.extents import extents
from tercet.protocol.backlog import Outgoing
from tercet.protocol.messages.messages import (
    AbortReq,
    ContinueGenerationReq,
    ExclusiveReady,
    FlushCacheReq,
    PauseGenerationReq,
    ReleaseMemoryReq,
    ResumeMemoryReq,
    TokenizedGenerateReqInput,
)
from tercet.protocol.messages.values import (
    FinishType,
    Grammar,
    GrammarKind,
    LogprobParams,
    LoRAAdapter,
    MemoryTag,
    Resume,
    pack_ints,
    unpack_ints,
)
from tercet.scheduler.core import state_snapshots
from tercet.scheduler.core.config import CoreConfig, PolicyName
from tercet.scheduler.core.events import AdapterPending, AdapterRead, CoreMessage, PeerBlocked, PeerDrained, PeerGone
from tercet.scheduler.core.plan import CacheGroup, Capacity, Plan
from tercet.scheduler.core.scheduler import Scheduler
from tercet.scheduler.core.window_pages import window_pages
from tercet.scheduler.diagnostics.event_log import LogFile, RecordingScheduler, read_events, replay
from tercet.scheduler.testing import Done, Driver, FakeExecutor, request, small_capacity

FRONTENDS = ("frontend-0", "frontend-1")
DETOKENIZERS = ("detokenizer-0", "detokenizer-1")
ADAPTERS = [LoRAAdapter(f"/adapters/{number}", f"{number:064x}") for number in range(4)]
VOCABULARY = range(1, 50)


def countdown(tokens: Sequence[int]) -> tuple[Sequence[int], bool]:
    """A grammar: after a number above 34, all below it as far as the next multiple of 7; 29 ends an output."""
    last = tokens[-1]
    must = range(last - 1, last - last % 7 - 1, -1) if last > 34 else ()
    return must, last == 29


class Unsteady(FakeExecutor):
    """Now and then the logits of a row are not finite. Looks at every plan before it runs."""

    world: "World"

    def submit(self, plan: Plan) -> Done:
        self.world.look_at(plan)
        result = super().submit(plan).result()
        chance = self.world.chance
        for index, row in enumerate(plan.rows):
            if row.sample and chance.random() < 0.002:
                result.token_ids[index] = -1
                if index in result.complete:
                    result.complete.remove(index)
        return Done(result)


class Recorded(RecordingScheduler):
    """A core and its log, that can be looked into as the core itself."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)


class World(Driver):
    """What frontends do, and what they must get for it."""

    def __init__(self, chance: random.Random, capacity: Capacity, config: CoreConfig, overlap: int) -> None:
        super().__init__(capacity, config, overlap=overlap, executor=FakeExecutor(capacity))
        self.chance = chance
        self.offers: list[ExclusiveReady] = []
        self.start()
        self.sent: dict[str, TokenizedGenerateReqInput] = {}
        self.source: dict[str, str] = {}
        self.aborted: set[tuple[str, int]] = set()
        self.closed: set[tuple[str, int]] = set()
        """Choices whose end the frontend knows without the scheduler."""
        self.longest = min(self.core.memory.tokens, capacity.context_length)
        self.prefixes = [self.ids(chance.randrange(1, self.longest)) for _ in range(3)]

    def start(self) -> None:
        """A scheduler, with nothing in it."""
        self.executor.close()
        self.fake = self.executor = Unsteady(self.core.capacity, grammar=countdown)
        self.executor.world = self
        self.log = io.BytesIO()
        self.core = Recorded(  # type: ignore[assignment]
            Scheduler(self.core.config, self.core.capacity), LogFile(self.log).record
        )
        self.in_flight.clear()
        self.offers = []

    def replay(self) -> None:
        """Every plan comes out of the log as it was made."""
        self.log.seek(0)
        assert all(logged == derived for _, logged, derived in replay(read_events(self.log)))

    def ids(self, count: int) -> list[int]:
        return [self.chance.choice(VOCABULARY) for _ in range(count)]

    def key(self, rid: str, index: int) -> tuple[str, int]:
        """Where the books of a choice are kept."""
        source = self.source[rid]
        return (rid if source == FRONTENDS[0] else f"{source}/{rid}"), index

    def step(self) -> bool:
        hopeful = self.core.runnable and not any(req.hold for req in self.core.waiting)
        went = super().step()
        assert went or not hopeful, "there is work, and nothing was planned"
        return went

    def wait_no_longer(self) -> None:
        """The oldest result comes before the next step is planned."""
        if self.in_flight:
            self._take(self.core.commit(self.in_flight.popleft().result()))
            self.check()

    def _take(self, outgoing: list[Outgoing]) -> None:
        super()._take(outgoing)
        self.offers += [message for _, message, *_ in self.others if isinstance(message, ExclusiveReady)]
        self.others.clear()

    def look_at(self, plan: Plan) -> None:
        """Nothing is planned for a blocked peer, and a request that runs alone is admitted to an empty house.

        A choice has one row, but for tokens that are assumed, and each row has its tokens.
        """
        reqs = self.core.in_flight[-1][1]
        planner = self.core.planner
        assert not any(planner.is_blocked(req) for req in reqs)
        assert sum(row.count for row in plan.rows) <= max(self.core.config.token_budget, self.core.capacity.slots)
        known = [row for index, row in enumerate(plan.rows) if index not in plan.draft_tokens]
        assert len({row.slot for row in known}) == len(known)
        assert not plan.draft_tokens or max(plan.draft_tokens) < self.core.config.draft_rows
        introduced = {init.slot for init in plan.introduce}
        for row, req in zip(plan.rows, reqs, strict=True):
            assert not (req.alone and row.slot in introduced and len(planner.running) > 1)

    def ask(self) -> None:
        chance = self.chance
        rid = f"r{len(self.source)}"
        self.source[rid] = chance.choice(FRONTENDS)
        max_new = chance.randrange(0, 30)
        self.sent[rid] = request(
            rid,
            chance.choice(self.prefixes)[: chance.randrange(1, self.longest)] + self.ids(chance.randrange(5)),
            n=chance.choice([1, 1, 2, 4]),
            max_new_tokens=max_new,
            min_new_tokens=chance.choice([0, 0, chance.randrange(max_new + 1)]),
            stop_token_ids=chance.choice([[], [], self.ids(4)]),
            ignore_eos=chance.random() < 0.5,
            priority=chance.randrange(3),
            salt=chance.choice(["", "", "tenant"]),
            tenant=chance.choice(["", "a", "b"]),
            detokenizer=chance.choice(DETOKENIZERS),
            alone=chance.random() < 0.05,
            logprobs=chance.choice([None, None, LogprobParams(), LogprobParams(prompt=True)]),
            grammar=chance.choice([None, None, Grammar(GrammarKind.REGEX, "")]),
            lora=chance.choice([None, None, *ADAPTERS]) if self.core.capacity.adapters else None,
        )
        self.sent[rid] = msgspec.structs.replace(self.sent[rid], prediction=pack_ints(self.prediction(rid)))
        self.send(self.sent[rid], source=self.source[rid])

    def prediction(self, rid: str) -> list[int]:
        """What is expected of a request, which most often is the truth but for some tokens."""
        chance = self.chance
        truth = self.answer(self.sent[rid], 0) if chance.random() < 0.6 else []
        return [token if chance.random() < 0.9 else chance.choice(VOCABULARY) for token in truth]

    def some_rid(self) -> str | None:
        """A request that was not refused and whose frontend lives."""
        rids = [rid for rid in self.sent if rid not in self.rejected]
        return self.chance.choice(rids[-12:]) if rids else None

    def abort(self) -> None:
        if (rid := self.some_rid()) is None:
            return
        count = self.sent[rid].sampling.n
        indices = self.chance.choice([[], [0], [self.chance.randrange(count)]])
        self.aborted |= {(rid, index) for index in indices or range(count)}
        self.send(AbortReq(rid=rid, indices=indices), source=self.source[rid])

    def again(self) -> None:
        """A later attempt, for what was lost on the way: some tokens of some choices, perhaps their end."""
        if (rid := self.some_rid()) is None:
            return
        chance, resume = self.chance, []
        for index in range(self.sent[rid].sampling.n):
            key = self.key(rid, index)
            if key in self.finishes and chance.random() < 0.7:
                continue
            if chance.random() < 0.1:  # a stop string ended it at the other end
                self.closed.add((rid, index))
                continue
            self.closed.discard((rid, index))
            if chance.random() < 0.5:
                self.output[key] = self.output.get(key, [])[: chance.randrange(len(self.output.get(key, [])) + 1)]
            resume.append(index)
        if not resume:
            self.send(AbortReq(rid=rid), source=self.source[rid])
        else:
            hold = chance.random() < 0.2
            self.go_on(rid, resume, detokenizer=chance.choice(DETOKENIZERS), deferred=hold, exclusive=hold)

    def go_on(self, rid: str, resume: Sequence[int], **route: Any) -> None:
        """A later attempt, of these choices, from where they are."""
        for index in resume:
            self.finishes.pop(self.key(rid, index), None)
            self.aborted.discard((rid, index))
        known = [Resume(index, pack_ints(self.output.get(self.key(rid, index), []))) for index in resume]
        attempt = self.sent[rid].attempt + 1
        self.sent[rid] = msgspec.structs.replace(self.sent[rid], attempt=attempt, resume=known, **route)
        self.send(self.sent[rid], source=self.source[rid])
        assert {*resume} >= {req.index for req in self.core.roster if req.rid == rid and req.finish is None}

    def unfinished(self, rid: str) -> list[int]:
        """The choices whose end a frontend does not know."""
        choices = range(self.sent[rid].sampling.n)
        return [n for n in choices if self.key(rid, n) not in self.finishes and (rid, n) not in self.closed]

    def take_offers(self) -> None:
        """A suspect may start: its frontend has heard that nothing else runs."""
        offers, self.offers = self.offers, []
        for offer in offers:
            rid = offer.rid
            if rid in self.sent and self.sent[rid].attempt == offer.attempt and (left := self.unfinished(rid)):
                self.go_on(rid, left, deferred=False)

    def crash(self) -> None:
        """The scheduler dies, and another goes on with what was unfinished."""
        self.replay()
        self.start()
        for rid in self.sent:
            if rid not in self.rejected and (left := self.unfinished(rid)):
                self.go_on(rid, left)

    def repeat(self) -> None:
        """An attempt that is held already is ignored."""
        held = [req for req in self.core.roster if req.rid in self.sent and req.attempt == self.sent[req.rid].attempt]
        if held:
            rid = self.chance.choice(held).rid
            before = self.core.counters.ignored
            self.send(self.sent[rid], source=self.source[rid])
            assert self.core.counters.ignored == before + 1

    def disturb(self) -> None:
        chance = self.chance
        peer = chance.choice(DETOKENIZERS)
        messages: list[CoreMessage] = [
            PeerBlocked(peer),
            PeerDrained(peer),
            PeerDrained(peer),
            PauseGenerationReq(id="p"),
            ContinueGenerationReq(id="c"),
            ContinueGenerationReq(id="c"),
            FlushCacheReq(id="f"),
            ReleaseMemoryReq(id="m", tags=[chance.choice([*MemoryTag])]),
            ResumeMemoryReq(id="m", tags=[*MemoryTag]),
            ResumeMemoryReq(id="m", tags=[*MemoryTag]),
            AdapterPending(ADAPTERS[0]),
            AdapterRead(ADAPTERS[0]),
            AdapterRead(ADAPTERS[0]),
        ]
        self.send(chance.choice(messages), source=chance.choice(FRONTENDS))

    def lose_a_frontend(self) -> None:
        gone = self.chance.choice(FRONTENDS)
        self.send(PeerGone(gone))
        assert not any(req.frontend == gone and req.finish is None for req in self.core.roster)
        for rid in [rid for rid in self.sent if self.source[rid] == gone]:
            del self.sent[rid]  # nobody waits for it

    def finish(self) -> None:
        """Let everything go its way, and look at every answer."""
        self.send(ContinueGenerationReq(id="c"), ResumeMemoryReq(id="m", tags=[*MemoryTag]))
        self.send(AdapterRead(ADAPTERS[0]), *map(PeerDrained, DETOKENIZERS))
        self.run()
        while self.offers:
            self.take_offers()
            self.run()
        self.assert_empty()
        self.replay()
        for rid, wanted in self.sent.items():
            for index in range(wanted.sampling.n):
                self.judge(rid, wanted, index)

    def judge(self, rid: str, wanted: TokenizedGenerateReqInput, index: int) -> None:
        key = self.key(rid, index)
        if rid in self.rejected:
            assert key not in self.output
        if rid in self.rejected or (rid, index) in self.closed:
            return
        finish, output, full = self.finishes[key], self.output[key], self.answer(wanted, index)
        if finish.type in {FinishType.ABORT, FinishType.ERROR}:
            assert finish.type == FinishType.ERROR or (rid, index) in self.aborted
            assert output == full[: len(output)]
            return
        assert output == full
        stopped = bool(full) and full[-1] in self.ends(wanted) and len(full) >= wanted.sampling.min_new_tokens
        complete = self.fake.follow([*unpack_ints(wanted.input_ids), *full], wanted.sampling)[1]
        if complete and len(full) == wanted.sampling.max_new_tokens and not stopped:
            assert finish.type in {FinishType.STOP, FinishType.LENGTH}  # resumed with all it could have
        else:
            kind = FinishType.STOP if stopped or complete else FinishType.LENGTH
            assert (finish.type, finish.matched) == (kind, full[-1] if stopped else None)
        if wanted.logprobs is not None:
            told = self.logprobs.get(key, {})
            assert [told[position] for position in range(len(output))] == [-position for position in range(len(output))]
            if wanted.logprobs.prompt:
                count = len(unpack_ints(wanted.input_ids))
                assert self.prompt_logprobs[key][1:] == [-position for position in range(1, count)]

    def ends(self, wanted: TokenizedGenerateReqInput) -> set[int]:
        sampling = wanted.sampling
        return {*sampling.stop_token_ids, *([] if sampling.ignore_eos else self.core.capacity.eos_token_ids)}


@extents(12, 120)
@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_every_choice_gets_its_tokens_and_one_final_answer(overlap: int, extent: settings) -> None:
    @extent
    @given(
        seed=st.integers(0, 2**32),
        policy=st.sampled_from(PolicyName),
        radix=st.booleans(),
        page_size=st.sampled_from([1, 4, 16]),
        pages=st.integers(12, 60),
        slots=st.integers(1, 8),
        budget=st.one_of(st.integers(1, 8), st.integers(1, 40)),
        groups=st.integers(1, 2),
        adapters=st.integers(0, 3),
        spare_snapshots=st.one_of(st.none(), st.integers(0, 12)),
        window=st.one_of(st.none(), st.integers(1, 20)),
        spare_window_pages=st.one_of(st.just(0), st.integers(0, 12)),
    )
    def check(seed: int, **options: Any) -> None:
        chance = random.Random(seed)
        run_world(world_of(chance, overlap, **options), chance)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(state_snapshots, "LONG_PROMPT", 16)
        patched.setattr(state_snapshots, "OUTPUT_INTERVAL", 4)
        check()


def world_of(
    chance: random.Random,
    overlap: int,
    *,
    policy: PolicyName,
    radix: bool,
    page_size: int,
    pages: int,
    slots: int,
    budget: int,
    groups: int,
    adapters: int,
    spare_snapshots: int | None,
    window: int | None,
    spare_window_pages: int,
    kind: type[World] = World,
    ranks: int = 1,
) -> World:
    reserve, stages = chance.choice([0.0, 0.7]), 1
    if overlap > 1 and spare_snapshots is None and ranks == 1:
        stages = chance.choice([1, overlap]) if window is None else overlap
    pages = max(pages // page_size, 4)
    of_groups = [CacheGroup(f"group {number}", pages + 3 * number) for number in range(groups)]
    if window is not None:
        least = window_pages(window, page_size, 1, max(budget, slots), stages)
        of_groups.append(CacheGroup("window", least + spare_window_pages, window))
    capacity = msgspec.structs.replace(
        small_capacity(page_size=page_size, slots=slots, grammars="countdown", adapters=adapters),
        groups=of_groups,
        snapshots=None if spare_snapshots is None else slots + spare_snapshots,
    )
    config = CoreConfig(
        policy=policy,
        radix_cache=radix,
        token_budget=budget,
        max_skips=8,
        max_queued=40,
        reserve=reserve,
        reserve_floor=reserve / 7,
        draft_rows=chance.choice([0, 2, 8, 32]) if stages == 1 else 0,
        stages=stages,
        attention_ranks=ranks,
    )
    return kind(chance, capacity, config, overlap)


def run_world(world: World, chance: random.Random) -> None:
    """Let things happen in a random order, and check all answers."""
    doings = [world.ask] * 12 + [world.abort] * 4 + [world.again] * 6 + [world.repeat] + [world.disturb] * 3
    for _ in range(80):
        chance.choice(doings)()
        if chance.random() < 0.02:
            world.lose_a_frontend()
        if chance.random() < 0.01:
            world.crash()
        for _ in range(chance.randrange(6)):
            chance.choice([world.step, world.step, world.step, world.wait_no_longer, world.take_offers])()
    world.finish()
