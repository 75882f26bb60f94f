"""Two frontends, one scheduler, and a prompt that kills it: the frontends cannot share their suspicions."""

import asyncio
import hashlib
from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer

from tercet.frontend.errors import ServerError
from tercet.frontend.manager.req_state import Generation
from tercet.frontend.manager.request import GenerateRequest, GenerationOptions
from tercet.frontend.manager.request_table import RequestTable
from tercet.frontend.manager.tokenizer_manager import TokenizerManager
from tercet.frontend.model.prompts import TokenPrompt
from tercet.frontend.routing.dispatcher import Dispatcher
from tercet.frontend.routing.model_registry import ModelRegistry
from tercet.frontend.routing.policies import RoundRobin
from tercet.protocol.membership.events import PeerDown, PeerReady, PeerUp
from tercet.protocol.messages.messages import Ready, TokenizerFiles
from tercet.protocol.messages.values import ModelIdentity, ModelLimits, Role, unpack_ints
from tercet.protocol.testing import ScriptedClock
from tercet.scheduler.core.plan import Capacity, Plan
from tercet.scheduler.testing import FakeExecutor, small_capacity
from tercet.scheduler.testing.fake_executor import Done
from tests.lossy_simulation import (
    BEAT,
    LOOK,
    TICK,
    DetokenizerPart,
    InlineExecutor,
    Port,
    SchedulerPart,
    Wire,
    tokenizer_file,
)

POISON = 99
"""Token id."""
SCHEDULER, DETOKENIZER, FRONTENDS = "scheduler-0", "detokenizer-0", ("frontend-0", "frontend-1")
RESTART = 10
"""In ticks."""


class DiedError(Exception):
    """Death of the simulated process."""


class CrashingExecutor(FakeExecutor):
    """Executor that dies when it computes a prompt with the poison in it."""

    def __init__(self, capacity: Capacity) -> None:
        super().__init__(capacity)
        self._poisoned: set[int] = set()

    def submit(self, plan: Plan) -> Done:
        for init in plan.introduce:
            self._poisoned.discard(init.slot)
            if POISON in unpack_ints(init.tokens):
                self._poisoned.add(init.slot)
        if any(row.slot in self._poisoned for row in plan.rows):
            raise DiedError
        return super().submit(plan)


class TwoFrontendSimulation:
    """Managers of real frontends, a real core and a real detokenizer; the scheduler dies and restarts."""

    def __init__(self) -> None:
        self.deaths = 0
        self._clock, self._wire = ScriptedClock(), Wire()
        pool = InlineExecutor()
        vocab_size = Tokenizer.from_str(tokenizer_file().decode()).get_vocab_size()
        self._capacity = small_capacity(pages=100, vocab_size=vocab_size)
        self._ports = {peer: Port(self._wire, peer) for peer in (SCHEDULER, DETOKENIZER, *FRONTENDS)}
        self._detokenizer = DetokenizerPart(self._ports[DETOKENIZER], self._clock)
        self._scheduler = self._new_scheduler()
        self.managers = {
            peer: TokenizerManager(
                self._ports[peer],
                ModelRegistry(pool),
                RequestTable(peer, Dispatcher(self._ports[peer], RoundRobin()), clock=self._clock),
            )
            for peer in FRONTENDS
        }
        self._back_at = 0
        self._ticks = 0

    async def begin(self) -> None:
        self._meet_scheduler()
        for peer in FRONTENDS:
            self._ports[DETOKENIZER].feed(peer, PeerUp(peer, Role.FRONTEND, "1"))
            self._ports[peer].feed(DETOKENIZER, PeerUp(DETOKENIZER, Role.DETOKENIZER, "1"))
            self._ports[peer].feed(DETOKENIZER, PeerReady(DETOKENIZER, Role.DETOKENIZER, Ready()))
            self.managers[peer].on_deliveries(self._ports[peer].drain())
        async with asyncio.timeout(10):
            while not all(manager.ready for manager in self.managers.values()):  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.001)
        self._wire.begin({}, ())

    async def ask(self, frontend: str, *prompt: int) -> Generation:
        request = GenerateRequest(
            model="m",
            prompt=TokenPrompt(list(prompt)),
            options=GenerationOptions(max_tokens=6, ignore_eos=True, seed=1),
        )
        return await self.managers[frontend].submit([request])

    def tick(self) -> None:
        self._ticks += 1
        self._clock.advance(TICK)
        self._wire.tick()
        for peer, manager in self.managers.items():
            if deliveries := self._ports[peer].drain():
                manager.on_deliveries(deliveries)
        if self._ticks == self._back_at:
            self._meet_scheduler()
        if self._ticks >= self._back_at:
            self._turn()
        self._detokenizer.turn()
        for peer, manager in self.managers.items():
            if self._ticks % BEAT == 0:
                self._ports[DETOKENIZER].send(peer, self._detokenizer.board.heartbeat(peer))
                if self._ticks >= self._back_at:
                    self._ports[SCHEDULER].send(peer, self._scheduler.board.heartbeat(peer))
            if self._ticks % LOOK == 0:
                manager.tick()

    def _turn(self) -> None:
        try:
            self._scheduler.turn()
        except DiedError:
            self.deaths += 1
            self._back_at = self._ticks + RESTART
            self._ports[SCHEDULER].drain()
            self._scheduler = self._new_scheduler()
            for peer in (*FRONTENDS, DETOKENIZER):
                self._ports[peer].feed(SCHEDULER, PeerDown(SCHEDULER, Role.SCHEDULER, "its connection broke"))

    def _new_scheduler(self) -> SchedulerPart:
        return SchedulerPart(self._ports[SCHEDULER], self._clock, 0, CrashingExecutor(self._capacity))

    def _meet_scheduler(self) -> None:
        files = tokenizer_file()
        reply = TokenizerFiles(id="", model="m", names=["tokenizer.json"], sha256=[hashlib.sha256(files).hexdigest()])
        limits = ModelLimits(model="m", context_length=256, vocab_size=self._capacity.vocab_size, max_total_tokens=256)
        up = PeerUp(SCHEDULER, Role.SCHEDULER, str(self.deaths + 1))
        self._ports[DETOKENIZER].feed(SCHEDULER, up)
        self._detokenizer.turn()
        self._ports[DETOKENIZER].feed(SCHEDULER, reply, files)
        self._detokenizer.turn()
        for peer, manager in self.managers.items():
            self._ports[peer].feed(SCHEDULER, up)
            self._ports[peer].feed(SCHEDULER, reply, files)
            ready = Ready(limits=limits, identity=ModelIdentity(weights="w"))
            self._ports[peer].feed(SCHEDULER, PeerReady(SCHEDULER, Role.SCHEDULER, ready))
            manager.on_deliveries(self._ports[peer].drain())


@pytest.mark.parametrize("innocents", [1, 2, 4])
@pytest.mark.parametrize("poisoned", [FRONTENDS[:1], FRONTENDS[1:], FRONTENDS])
async def test_only_the_poison_fails(innocents: int, poisoned: Sequence[str]) -> None:
    simulation = TwoFrontendSimulation()
    await simulation.begin()
    poison = [await simulation.ask(peer, POISON, 5) for peer in poisoned]
    others = [await simulation.ask(peer, 10 + number, 11) for peer in FRONTENDS for number in range(innocents)]
    for _ in range(1500):
        simulation.tick()
        if all(generation.states[0].done for generation in [*poison, *others]):
            break
    assert all(isinstance(each.states[0].error, ServerError) for each in poison)
    assert [each.states[0].error for each in others] == [None] * len(others)
    assert all(each.states[0].done for each in others)
    assert simulation.deaths == 2 + len(poison), "two that made them suspect, and one for each alone"
    for manager in simulation.managers.values():
        await manager.close()
