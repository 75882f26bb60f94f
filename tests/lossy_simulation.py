"""Real schedulers, detokenizers and a frontend in one thread, on a network with a scripted fate for each message.

Time advances by ticks. The parts are real down to their loops; only the model, the sockets and the clock are not.
"""

import functools
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tercet.detokenizer.detokenizer_manager import DetokenizerManager
from tercet.detokenizer.loop import DetokenizerLoop
from tercet.detokenizer.status import StatusBoard as TextBoard
from tercet.detokenizer.tokenizer_store import TokenizerStore
from tercet.frontend.manager.request_table import RequestTable
from tercet.frontend.manager.tokenizer_manager import TokenizerManager
from tercet.frontend.routing.dispatcher import Dispatcher
from tercet.frontend.routing.model_registry import ModelRegistry
from tercet.frontend.routing.policies import RoundRobin
from tercet.protocol.membership.events import Delivery, PeerEvent, PeerReady, PeerUp
from tercet.protocol.messages.codec import Frame
from tercet.protocol.messages.messages import (
    BatchStrOutput,
    BatchTokenIDOutput,
    Heartbeat,
    Message,
    Ready,
    TokenizedGenerateReqInput,
    TokenizerFiles,
)
from tercet.protocol.messages.values import ModelIdentity, ModelLimits, Role
from tercet.protocol.testing import ScriptedClock
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.invariants import violations
from tercet.scheduler.core.scheduler import Scheduler
from tercet.scheduler.loop import SchedulerLoop
from tercet.scheduler.status import StatusBoard
from tercet.scheduler.testing import FakeExecutor, small_capacity

FRONTEND = "frontend-0"
TICK = 0.05
BEAT = 5
"""Ticks between heartbeats."""
LOOK = 10
"""Ticks between the frontend's checks of waiting requests."""


@dataclass(frozen=True)
class Fate:
    """Fate of one message: the number of copies that arrive, and their delay in ticks."""

    copies: int = 1
    late: int = 0


Name = tuple[str, int]
"""Name of a message: its kind, and the number of earlier messages of that kind."""


@dataclass(frozen=True)
class Closed:
    """Period in which a peer's queue is full for the frontend."""

    peer: str
    first: int
    ticks: int


_KINDS: dict[type[Message], str] = {
    TokenizedGenerateReqInput: "request",
    BatchTokenIDOutput: "ids",
    BatchStrOutput: "text",
    Heartbeat: "heartbeat",
}


@functools.cache
def tokenizer_file() -> bytes:
    """Return a byte-level tokenizer, whose characters can span tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the cat sat on the mat, and the dog too"] * 4, trainer)
    return tokenizer.to_str().encode()


class InlineExecutor(Executor):
    """Executor that runs the work in `submit`."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class Wire:
    """Simulated network. Messages arrive at the next tick, unless `fates` says otherwise."""

    def __init__(self) -> None:
        self.inboxes: dict[str, list[Delivery]] = {}
        self.begin({}, ())

    def begin(self, fates: Mapping[Name, Fate], closed: Sequence[Closed]) -> None:
        """Reset the counts of messages and set the fates of those to come."""
        self.fates = fates
        self.closed = closed
        self.names: list[Name] = []
        """Messages since `begin`."""
        self._counts: dict[str, int] = {}
        self._flying: list[tuple[int, str, Delivery]] = []
        self._now = 0

    def send(self, source: str, target: str, message: Message, frames: tuple[Frame, ...]) -> bool:
        if source == FRONTEND and any(
            each.peer == target and 0 <= self._now - each.first < each.ticks for each in self.closed
        ):
            return False
        kind = _KINDS.get(type(message), "other")
        name = kind, self._counts.get(kind, 0)
        self._counts[kind] = name[1] + 1
        self.names.append(name)
        fate = self.fates.get(name, Fate())
        delivery = Delivery(source, message, tuple(memoryview(frame) for frame in frames))
        self._flying += [(self._now + 1 + fate.late, target, delivery)] * fate.copies
        return True

    def tick(self) -> None:
        self._now += 1
        arrived = [each for each in self._flying if each[0] <= self._now]
        self._flying = [each for each in self._flying if each[0] > self._now]
        for _, target, delivery in arrived:
            self.inboxes[target].append(delivery)


class Port:
    """Node of a part on the simulated network."""

    def __init__(self, wire: Wire, peer: str) -> None:
        self.peer = peer
        self._wire = wire
        self._wire.inboxes[peer] = []

    def send(self, peer: str, message: Message, *frames: Frame) -> bool:
        return self._wire.send(self.peer, peer, message, frames)

    def drain(self, wait: float | None = 0) -> list[Delivery]:
        taken, self._wire.inboxes[self.peer] = self._wire.inboxes[self.peer], []
        return taken

    def feed(self, source: str, event: Message | PeerEvent, *frames: bytes) -> None:
        self._wire.inboxes[self.peer].append(Delivery(source, event, tuple(map(memoryview, frames))))

    def set_ready(self, ready: Ready) -> None: ...

    def wake(self) -> None: ...


class ContraryExecutor(FakeExecutor):
    """Executor that always generates other tokens than FakeExecutor."""

    def _sampled(self, value: int, choice: int, suppressed: Collection[int]) -> int:
        return (super()._sampled(value, choice, suppressed) + 1) % self.capacity.vocab_size


class SchedulerPart:
    """Loop, core and fake model of a scheduler."""

    def __init__(self, port: Port, clock: ScriptedClock, overlap: int, executor: FakeExecutor) -> None:
        self.port = port
        self.executor = executor
        self.core = Scheduler(CoreConfig(token_budget=24), executor.capacity)
        self.board = StatusBoard(clock)
        self.loop = SchedulerLoop(self.core, executor, port.drain, port.send, self.board, clock, overlap=overlap)

    def turn(self) -> None:
        self.loop.turn()
        assert violations(self.core) == []


class DetokenizerPart:
    """Loop and manager of a detokenizer."""

    def __init__(self, port: Port, clock: ScriptedClock) -> None:
        self.port = port
        store = TokenizerStore()
        self.manager = DetokenizerManager(store)
        self.board = TextBoard(self.manager, clock)
        self.loop = DetokenizerLoop(port, self.manager, store, self.board, clock, 100)

    def turn(self) -> None:
        self.loop.turn(0)


@dataclass
class LossySimulation:
    """Two schedulers, two detokenizers, one frontend. Call `begin` first, in a running event loop."""

    fates: Mapping[Name, Fate] = field(default_factory=dict)
    overlap: int = 0
    closed: Sequence[Closed] = ()
    disagree: bool = False
    """The schedulers' models generate different tokens, as on different hardware."""

    def __post_init__(self) -> None:
        self.clock = ScriptedClock()
        self.wire = Wire()
        tokenizer = Tokenizer.from_str(tokenizer_file().decode())
        self.capacity = small_capacity(pages=100, vocab_size=tokenizer.get_vocab_size())
        executors = FakeExecutor, ContraryExecutor if self.disagree else FakeExecutor
        self.schedulers = {
            peer: SchedulerPart(Port(self.wire, peer), self.clock, self.overlap, executor(self.capacity))
            for peer, executor in zip(("scheduler-0", "scheduler-1"), executors, strict=True)
        }
        self.detokenizers = {
            peer: DetokenizerPart(Port(self.wire, peer), self.clock) for peer in ("detokenizer-0", "detokenizer-1")
        }
        self.port = Port(self.wire, FRONTEND)
        pool = InlineExecutor()
        requests = RequestTable(FRONTEND, Dispatcher(self.port, RoundRobin()), clock=self.clock)
        self.manager = TokenizerManager(self.port, ModelRegistry(pool), requests)
        self._ticks = 0

    async def begin(self, settle: Callable[[], Any]) -> None:
        """Link all peers without a fault; `settle` runs the event loop."""
        files = tokenizer_file()
        reply = TokenizerFiles(id="", model="m", names=["tokenizer.json"], sha256=[hashlib.sha256(files).hexdigest()])
        limits = ModelLimits(model="m", context_length=256, vocab_size=self.capacity.vocab_size, max_total_tokens=256)
        for part in self.detokenizers.values():
            part.port.feed(FRONTEND, PeerUp(FRONTEND, Role.FRONTEND, "1"))
        for peer in self.schedulers:
            for part in self.detokenizers.values():
                part.port.feed(peer, PeerUp(peer, Role.SCHEDULER, "1"))
                part.turn()
                part.port.feed(peer, reply, files)
                part.turn()
            self.port.feed(peer, PeerUp(peer, Role.SCHEDULER, "1"))
            self.port.feed(peer, reply, files)
            ready = Ready(limits=limits, identity=ModelIdentity(weights="w"))
            self.port.feed(peer, PeerReady(peer, Role.SCHEDULER, ready))
        for peer in self.detokenizers:
            self.port.feed(peer, PeerUp(peer, Role.DETOKENIZER, "1"))
            self.port.feed(peer, PeerReady(peer, Role.DETOKENIZER, Ready()))
        self.manager.on_deliveries(self.port.drain())
        while not self.manager.ready:
            await settle()
        self.wire.begin(self.fates, self.closed)

    def tick(self) -> None:
        """Advance by a tick: deliver the due messages, and run every part once."""
        self._ticks += 1
        self.clock.advance(TICK)
        self.wire.tick()
        if deliveries := self.port.drain():
            self.manager.on_deliveries(deliveries)
        parts: list[SchedulerPart | DetokenizerPart] = [*self.schedulers.values(), *self.detokenizers.values()]
        for part in parts:
            part.turn()
            if self._ticks % BEAT == 0:
                part.port.send(FRONTEND, part.board.heartbeat(FRONTEND))
        if self._ticks % LOOK == 0:
            self.manager.tick()

    @property
    def held(self) -> int:
        """Choices held by schedulers and detokenizers."""
        queued = sum(len(list(part.core.roster)) for part in self.schedulers.values())
        return queued + sum(len(part.manager) for part in self.detokenizers.values())
