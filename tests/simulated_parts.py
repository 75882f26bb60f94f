"""Real parts down to their loops, on a simulated network: they can be killed, stopped, terminated and started."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import UnionType

from msgspec import structs
from tokenizers import Tokenizer

from tercet.detokenizer.detokenizer_manager import DetokenizerManager
from tercet.detokenizer.loop import MIN_DRAIN_SECONDS, DetokenizerLoop
from tercet.detokenizer.status import StatusBoard as TextBoard
from tercet.detokenizer.tokenizer_store import TokenizerStore
from tercet.frontend.manager.request_table import RequestTable
from tercet.frontend.manager.tokenizer_manager import TokenizerManager
from tercet.frontend.model.served_model import ServedModel
from tercet.frontend.routing.dispatcher import Dispatcher
from tercet.frontend.routing.model_registry import ModelRegistry
from tercet.frontend.routing.policies import POLICIES
from tercet.frontend.structured_output.checker import GrammarChecker
from tercet.protocol.config import NodeConfig
from tercet.protocol.membership.events import Delivery
from tercet.protocol.messages.codec import Frame
from tercet.protocol.messages.messages import (
    DetokenizerInbox,
    FrontendInbox,
    Heartbeat,
    Message,
    Ready,
    SchedulerInbox,
    TokenizerFiles,
    TokenizerFilesReq,
)
from tercet.protocol.messages.values import Grammar, ModelIdentity, ModelLimits, Role, Task
from tercet.protocol.node_core import Answer, unanswered
from tercet.protocol.system.clock import SuspendAwareClock
from tercet.protocol.testing import ScriptedClock
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.embedding.inputs import TextInputs
from tercet.scheduler.core.embedding.plan import EncodePlan, EncoderCapacity, EncodeResult
from tercet.scheduler.core.embedding.scheduler import EmbeddingScheduler
from tercet.scheduler.core.invariants import violations
from tercet.scheduler.core.plan import Plan, StepResult
from tercet.scheduler.core.scheduler import Scheduler
from tercet.scheduler.loop import SchedulerLoop
from tercet.scheduler.status import StatusBoard
from tercet.scheduler.testing import FakeEncoder, FakeExecutor, small_capacity
from tests.lossy_simulation import InlineExecutor, tokenizer_file
from tests.simulated_network import Network, SimulatedNode

DIRECTORY = "ipc:///simulated"
TICK = 0.025
NAMES = {
    "frontend-0": Role.FRONTEND,
    "frontend-1": Role.FRONTEND,
    "scheduler-0": Role.SCHEDULER,
    "scheduler-1": Role.SCHEDULER,
    "scheduler-e": Role.SCHEDULER,
    "detokenizer-0": Role.DETOKENIZER,
    "detokenizer-1": Role.DETOKENIZER,
}
VOCABULARY = Tokenizer.from_str(tokenizer_file().decode()).get_vocab_size()
CAPACITY = small_capacity(pages=100, vocab_size=VOCABULARY, grammars="script 1")
RECURRENT = structs.replace(CAPACITY, snapshots=CAPACITY.slots + 6)
"""Capacity of one of the schedulers: its states are lost with it, and others compute their tokens again."""
ENCODES = EncoderCapacity(context_length=64, vocab_size=VOCABULARY, width=3)


class DiedError(Exception):
    """Death of the simulated process."""


class Part(ABC):
    """One incarnation of a process. `turn` may raise DiedError; `gone` is set when it has left by itself."""

    def __init__(
        self, network: Network, clock: ScriptedClock, role: Role, peer: str, union: UnionType | type[Message]
    ) -> None:
        self.peer = peer
        self.role = role
        self.clock = clock
        self.gone = False
        self.leaving = False
        config = self._config(peer, role, fixed=network.fixed)
        self.board = SimulatedNode(network, config, union, self.heartbeat, self.answers(), clock)
        self.board.open()

    @staticmethod
    def _config(peer: str, role: Role, *, fixed: bool) -> NodeConfig:
        """Return the config. Every incarnation has a new path in a directory, or the same address if `fixed`."""
        names = [name for name, each in NAMES.items() if each in {Role.SCHEDULER, Role.DETOKENIZER}]
        if fixed:
            ports = {name: f"tcp://127.0.0.1:{5000 + number}" for number, name in enumerate(NAMES)}
            listen, specs = ports[peer], [ports[name] for name in names]
        else:
            listen, specs = DIRECTORY, [f"{DIRECTORY}/{role}-*" for role in ("scheduler", "detokenizer")]
        dialled = tuple(specs) if role is Role.FRONTEND else ()
        return NodeConfig(role, peer, listen, connect=dialled, insecure_loopback=True)

    def turn(self) -> None:
        self.board.wait(0)
        deliveries, _ = self.board.receive(256)
        self.take(deliveries + self.board.tick())

    def die(self) -> None:
        self.gone = True
        self.board.die()

    def leave(self, reason: str) -> None:
        self.gone = True
        self.board.close(reason)

    def terminate(self) -> None:
        """Leave as after SIGTERM."""
        self.leaving = True

    @abstractmethod
    def heartbeat(self, peer: str) -> Heartbeat: ...

    @abstractmethod
    def take(self, deliveries: list[Delivery]) -> None: ...

    def answers(self) -> dict[type[Message], Answer]:
        return {}


class SchedulerPart(Part):
    """Scheduler that dies in its next step with `dies_in_step`, or after `dies_sending` more messages of its core."""

    def __init__(self, network: Network, clock: ScriptedClock, peer: str, loads: float, overlap: int = 0) -> None:
        self.status = StatusBoard(SuspendAwareClock(clock))
        self._ready_at = clock() + loads
        self._arrived: list[Delivery] = []
        self.dies_in_step = False
        self.dies_sending: int | None = None
        super().__init__(network, clock, Role.SCHEDULER, peer, SchedulerInbox)
        self._overlap = overlap
        self.capacity = RECURRENT if peer == "scheduler-1" else CAPACITY
        self._build()

    def _build(self) -> None:
        executor = FakeExecutor(self.capacity, before_step=self._before_step, grammar=script)
        self.core = Scheduler(CoreConfig(token_budget=24), self.capacity)
        args = self._drain, self._send, self.status, self.clock
        self.loop: SchedulerLoop[Plan, StepResult] | SchedulerLoop[EncodePlan, EncodeResult] = SchedulerLoop(
            self.core, executor, *args, overlap=self._overlap
        )
        limits = ModelLimits(
            model="m",
            context_length=CAPACITY.context_length,
            vocab_size=VOCABULARY,
            max_total_tokens=self.core.memory.tokens,
            grammars=CAPACITY.grammars,
        )
        self.ready = Ready(limits=limits, identity=ModelIdentity(weights="w"))

    @property
    def held(self) -> int:
        return len(list(self.core.roster))

    def heartbeat(self, peer: str) -> Heartbeat:
        return self.status.heartbeat(peer)

    def answers(self) -> dict[type[Message], Answer]:
        return {TokenizerFilesReq: self._answer, Heartbeat: unanswered}

    def take(self, deliveries: list[Delivery]) -> None:
        self._arrived += deliveries
        if self.clock() < self._ready_at:
            return
        if self.board.table.ready is None:
            self.board.set_ready(self.ready)
        self.loop.draining = self.leaving
        self.loop.turn()
        self.check()
        if self.leaving and self.loop_is_empty:
            self.leave("stopped")

    def check(self) -> None:
        assert violations(self.core) == []

    def assert_empty(self) -> None:
        memory = self.core.memory
        assert memory.pools.free + memory.cache.cached == memory.pools.total
        assert len(memory.free_slots) == CAPACITY.slots

    @property
    def loop_is_empty(self) -> bool:
        return not self.held and not self.loop.outbox.backlog

    def _answer(self, source: str, message: Message) -> tuple[Message, bytes]:
        assert isinstance(message, TokenizerFilesReq)
        files = tokenizer_file()
        sha = hashlib.sha256(files).hexdigest()
        return TokenizerFiles(id=message.id, model="m", names=["tokenizer.json"], sha256=[sha]), files

    def _drain(self, wait: float | None) -> list[Delivery]:
        arrived, self._arrived = self._arrived, []
        return arrived

    def _send(self, peer: str, message: Message, *frames: Frame) -> bool:
        if self.dies_sending is not None:
            self.dies_sending -= 1
            if self.dies_sending < 0:
                raise DiedError
        return self.board.send(peer, message, *frames)

    def _before_step(self, plan: Plan | EncodePlan) -> None:
        if self.dies_in_step:
            raise DiedError


class EncoderPart(SchedulerPart):
    """Scheduler of an embedding model."""

    def _build(self) -> None:
        encoder = FakeEncoder(ENCODES, before_step=self._before_step)
        self.encodes = EmbeddingScheduler(CoreConfig(token_budget=24), TextInputs(ENCODES))
        args = self._drain, self._send, self.status, self.clock
        self.loop = SchedulerLoop(self.encodes, encoder, *args, overlap=self._overlap)
        limits = ModelLimits(
            model="e",
            context_length=64,
            vocab_size=VOCABULARY,
            max_total_tokens=64,
            task=Task.EMBED,
            width=ENCODES.width,
        )
        self.ready = Ready(limits=limits, identity=ModelIdentity(weights="e"))

    @property
    def held(self) -> int:
        return len(self.encodes.roster)

    def check(self) -> None: ...

    def assert_empty(self) -> None:
        assert self.encodes.empty
        assert not len(self.encodes.waiting)


class DetokenizerPart(Part):
    """Detokenizer, which is also its loop's node."""

    def __init__(self, network: Network, clock: ScriptedClock, peer: str) -> None:
        store = TokenizerStore()
        self.manager = DetokenizerManager(store)
        self.status = TextBoard(self.manager, SuspendAwareClock(clock))
        self._arrived: list[Delivery] = []
        self._leaves_at: float | None = None
        super().__init__(network, clock, Role.DETOKENIZER, peer, DetokenizerInbox)
        self.loop = DetokenizerLoop(self, self.manager, store, self.status, clock, 100)

    def heartbeat(self, peer: str) -> Heartbeat:
        return self.status.heartbeat(peer)

    def answers(self) -> dict[type[Message], Answer]:
        return {Heartbeat: unanswered}

    def take(self, deliveries: list[Delivery]) -> None:
        self._arrived += deliveries
        if self.leaving and self._leaves_at is None:
            self.status.drain()
            self._leaves_at = self.clock() + MIN_DRAIN_SECONDS
        busy = self.loop.turn(0)
        busy = busy or bool(len(self.manager)) or bool(self.loop.outbox.backlog)
        if self._leaves_at is not None and self.clock() >= self._leaves_at and not busy:
            self.leave("stopping")

    def drain(self, wait: float | None = 0) -> list[Delivery]:
        arrived, self._arrived = self._arrived, []
        return arrived

    def send(self, peer: str, message: Message, *frames: Frame) -> bool:
        return self.board.send(peer, message, *frames)

    def set_ready(self, ready: Ready) -> None:
        self.board.set_ready(ready)

    def wake(self) -> None: ...


class AnyGrammar(GrammarChecker):
    """Checker that accepts every grammar, because the script stands for all."""

    def __init__(self) -> None: ...

    async def check(self, grammar: Grammar, model: ServedModel, param: str = "response_format") -> None: ...

    async def close(self) -> None: ...


class FrontendPart(Part):
    """Frontend below HTTP."""

    def __init__(self, network: Network, clock: ScriptedClock, peer: str, policy: str) -> None:
        self._network = network
        self._started = network.now
        super().__init__(network, clock, Role.FRONTEND, peer, FrontendInbox)
        pool = InlineExecutor()
        dispatcher = Dispatcher(self.board, POLICIES[policy]())
        requests = RequestTable(peer, dispatcher, clock=SuspendAwareClock(clock))
        self.manager = TokenizerManager(self.board, ModelRegistry(pool), requests)
        self.manager.grammars = AnyGrammar()

    def heartbeat(self, peer: str) -> Heartbeat:
        return self.manager.heartbeat(peer)

    def take(self, deliveries: list[Delivery]) -> None:
        if self.board.table.ready is None and self.manager.ready:
            self.board.set_ready(Ready())
        if deliveries:
            self.manager.on_deliveries(deliveries)
        if (self._network.now - self._started) % round(0.5 / TICK) == 0:
            self.manager.tick()
        if self.leaving and not self.manager.running:
            self.leave("stopped")

    def terminate(self) -> None:
        super().terminate()
        self.manager.drain(0.0)


def script(tokens: Sequence[int]) -> tuple[Sequence[int], bool]:
    """Return the forced tokens, and whether the end is forced.

    After a number that ends in binary 01 or 10, the numbers up to the next one in 11 follow. After 11111 the text ends.
    """
    last = tokens[-1]
    must = list(range(last + 1, (last | 3) + 1)) if last % 4 in {1, 2} and last | 3 < VOCABULARY else []
    return must, last % 32 == 31
