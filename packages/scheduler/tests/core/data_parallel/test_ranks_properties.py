"""Anything may happen on several attention ranks, too: see `test_properties`."""

import io
import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packages.protocol.tests.extents import extents
from packages.scheduler.tests.core.test_properties import Recorded, World, countdown, run_world, world_of
from tercet.scheduler.core import state_snapshots
from tercet.scheduler.core.config import PolicyName
from tercet.scheduler.core.data_parallel.scheduler import DataParallelScheduler
from tercet.scheduler.core.invariants import violations
from tercet.scheduler.core.plan import Plan
from tercet.scheduler.core.request import Req
from tercet.scheduler.diagnostics.event_log import LogFile
from tercet.scheduler.testing import Done
from tercet.scheduler.testing.attention_ranks import FakeRanks
from tercet.scheduler.testing.driver import assert_empty


class UnsteadyRanks(FakeRanks):
    """Ranks on which the logits of a row are not finite now and then. Looks at every plan before it runs."""

    world: "RanksWorld"

    def submit(self, plan: Plan) -> Done:
        self.world.look_at(plan)
        result = super().submit(plan).result()
        for index, row in enumerate(plan.rows):
            if row.sample and self.world.chance.random() < 0.002:
                result.token_ids[index] = -1
                if index in result.complete:
                    result.complete.remove(index)
        return Done(result)


class RecordedRanks(Recorded):
    """A core of several ranks, that can be looked into as that of one."""

    @property
    def roster(self) -> list[Req]:
        return [req for core in self.cores for req in core.roster]

    @property
    def waiting(self) -> list[Req]:
        return [req for core in self.cores for req in core.waiting]

    @property
    def memory(self) -> Any:
        return self.cores[0].memory

    @property
    def counters(self) -> Any:
        return SimpleNamespace(ignored=sum(core.counters.ignored for core in self.cores))


class RanksWorld(World):
    """A world whose scheduler has several attention ranks."""

    core: Any

    def start(self) -> None:
        config, capacity = self.core.config, self.core.capacity
        self.executor.close()
        ranks = UnsteadyRanks(capacity, config.attention_ranks, grammar=countdown)
        ranks.world, self.executor, self.fake = self, ranks, ranks.ranks[0]
        self.log = io.BytesIO()
        self.core = RecordedRanks(DataParallelScheduler(config, capacity), LogFile(self.log).record)
        self.in_flight.clear()
        self.offers = []

    def check(self) -> None:
        cores = getattr(self.core, "cores", [])
        assert [each for core in cores for each in violations(core)] == []

    def assert_empty(self) -> None:
        for core in self.core.cores:
            assert_empty(core)

    def look_at(self, plan: Plan) -> None:
        """Nothing is planned for a blocked peer, and an exclusive request is admitted while no rank runs another."""
        slots, cores = self.core.capacity.slots, self.core.cores
        planned = [core for core, own in zip(cores, self.core.in_flight[-1], strict=True) if own is not None]
        reqs = [req for core in planned for req in core.in_flight[-1][1]]
        assert len(reqs) == len(plan.rows)
        for core in planned:
            assert not any(core.planner.is_blocked(req) for req in core.in_flight[-1][1])
        for rank in range(len(cores)):
            count = sum(row.count for row in plan.rows if row.slot // slots == rank)
            assert count <= max(self.core.config.token_budget, slots)
        introduced = {init.slot for init in plan.introduce}
        for row, req in zip(plan.rows, reqs, strict=True):
            if req.alone and row.slot in introduced:
                assert planned == [cores[row.slot // slots]]
                assert len(planned[0].planner.running) == 1


@extents(12, 120)
@pytest.mark.parametrize("overlap", [0, 1])
def test_every_choice_gets_its_tokens_and_one_final_answer(overlap: int, extent: settings) -> None:
    @extent
    @given(
        seed=st.integers(0, 2**32),
        ranks=st.integers(2, 3),
        policy=st.sampled_from(PolicyName),
        radix=st.booleans(),
        page_size=st.sampled_from([1, 4, 16]),
        pages=st.integers(12, 60),
        slots=st.integers(1, 4),
        budget=st.integers(1, 20),
        groups=st.integers(1, 2),
        adapters=st.integers(0, 3),
        spare_snapshots=st.one_of(st.none(), st.integers(0, 12)),
        window=st.one_of(st.none(), st.integers(1, 20)),
        spare_window_pages=st.integers(0, 12),
    )
    def check(seed: int, **options: Any) -> None:
        chance = random.Random(seed)
        run_world(world_of(chance, overlap, kind=RanksWorld, **options), chance)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(state_snapshots, "LONG_PROMPT", 16)
        patched.setattr(state_snapshots, "OUTPUT_INTERVAL", 4)
        check()
