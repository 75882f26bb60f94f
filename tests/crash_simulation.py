"""Simulation of frontends, schedulers, an encoder and detokenizers that die, hang, leave and return under load.

The seed determines everything: requests, faults, and the delay of each message. In every run, a request whose frontend
survives ends exactly once, with exactly its own tokens and text.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tercet.frontend.errors import ApiError, ModelNotFoundError, UnavailableError
from tercet.frontend.manager.embedding_state import EmbeddingBatch
from tercet.frontend.manager.req_state import Generation
from tercet.frontend.manager.request import GenerateRequest, GenerationOptions
from tercet.frontend.model.embedding_request import EmbeddingRequest, TokenInput
from tercet.frontend.model.prompts import TokenPrompt
from tercet.protocol.messages.values import (
    FinishReason,
    Grammar,
    GrammarKind,
    LogprobParams,
    Role,
    unpack_floats,
)
from tercet.protocol.testing import ScriptedClock
from tests.simulated_network import Network
from tests.simulated_parts import (
    NAMES,
    TICK,
    VOCABULARY,
    DetokenizerPart,
    DiedError,
    EncoderPart,
    FrontendPart,
    Part,
    SchedulerPart,
)

TROUBLE = 20.0
"""Seconds with faults."""
PATIENCE = 60.0
"""Seconds after the faults in which all requests must end, including the queued ones."""
LETTERS = 40, 70
"""Token ids of whole characters, with which prompts end."""


@dataclass(frozen=True)
class Job:
    """Request of a client, and its time."""

    number: int
    at: float
    prompt: tuple[int, ...]
    n: int = 1
    tokens: int = 12
    stop: tuple[str, ...] = ()
    scored: bool = False
    guided: bool = False

    def request(self) -> GenerateRequest:
        return GenerateRequest(
            model="m",
            prompt=TokenPrompt(list(self.prompt)),
            options=GenerationOptions(
                n=self.n,
                max_tokens=self.tokens,
                ignore_eos=True,
                stop=list(self.stop),
                seed=1,
                logprobs=LogprobParams(prompt=True) if self.scored else None,
            ),
            grammar=Grammar(GrammarKind.REGEX, "script") if self.guided else None,
        )


def jobs(chance: random.Random, count: int) -> Iterator[Job]:
    shared = [chance.randrange(VOCABULARY) for _ in range(40)]
    for number in range(count):
        length = chance.choice([2, 5, 20, 60])
        own = [chance.randrange(VOCABULARY) for _ in range(length)]
        own[-1] = chance.randrange(*LETTERS)
        prompt = shared[: chance.randrange(len(shared))] + own if chance.random() < 0.5 else own
        yield Job(
            number,
            at=chance.uniform(0.0, TROUBLE),
            prompt=tuple(prompt),
            n=chance.choice([1, 1, 1, 2, 3]),
            tokens=chance.choice([1, 5, 20, 60, 120]),
            stop=chance.choice([(), (), ("e", "th"), ("zq",)]),
            scored=chance.random() < 0.2,
            guided=chance.random() < 0.2,
        )


@dataclass
class Client:
    """Client of a generation, with its output so far."""

    job: Job
    frontend: FrontendPart
    generation: Generation
    leaves_at: float
    """Time at which the client hangs up."""
    texts: dict[int, str] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    finishes: dict[int, FinishReason] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return self.generation.states[0].done

    @property
    def error(self) -> ApiError | None:
        return self.generation.states[0].error

    def take(self) -> None:
        for update in self.generation.states[0].pop_updates():
            index = update.index
            assert index not in self.finishes, "a choice went on after its end"
            self.texts[index] = self.texts.get(index, "") + update.text
            self.ids.setdefault(index, []).extend(update.token_ids)
            for each in update.logprobs:
                self.logprobs.setdefault(index, []).extend(unpack_floats(each.chosen))
            if update.finish is not None:
                self.finishes[index] = update.finish


@dataclass
class Asked:
    """Client of an embedding request."""

    frontend: FrontendPart
    inputs: list[list[int]]
    task: "asyncio.Task[EmbeddingBatch]"


class CrashSimulation:
    """Simulated server with clients and faults; `run` plays it to its end."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        trouble, count = self.chance.choice([2, 8, 8, 16, 30]), self.chance.choice([12, 24, 60])
        self.clock = ScriptedClock()
        self.network = Network(random.Random(seed + 1))
        self.network.loss = self.chance.choice([0.0, 0.0, 0.002])
        self.network.fixed = self.chance.random() < 0.3
        self._busy = self.chance.choice([0.0, 0.0, 0.1, 0.5])
        """Probability that a part is too busy for its turn."""
        self.overlap = self.chance.randint(0, 1)
        self.policy = self.chance.choice(["round_robin", "cache_aware", "least_loaded"])
        self.parts: dict[str, Part] = {name: self.start(name, 0.0) for name in NAMES}
        self.clients: list[Client] = []
        self.encoders: list[Asked] = []
        self.refused: list[Job] = []
        self.happened: list[str] = []
        self.losses: Counter[str] = Counter()
        """Number of times that a part may have seemed dead."""
        self._starts: dict[str, float] = {}
        self._wakes: dict[str, float] = {}
        self._to_do = sorted(jobs(self.chance, count), key=lambda job: job.at)
        self._to_encode = sorted(self.chance.uniform(0.0, TROUBLE) for _ in range(count // 4))
        self._troubles = sorted(self.chance.uniform(1.0, TROUBLE) for _ in range(trouble))
        self._began = self.clock()

    @property
    def time(self) -> float:
        return self.clock() - self._began

    def start(self, name: str, loads: float) -> Part:
        network, clock = self.network, self.clock
        match NAMES[name]:
            case Role.FRONTEND:
                return FrontendPart(network, clock, name, self.policy)
            case Role.DETOKENIZER:
                return DetokenizerPart(network, clock, name)
            case _:
                kind = EncoderPart if name == "scheduler-e" else SchedulerPart
                return kind(network, clock, name, loads, self.overlap)

    # Steps of a tick.

    async def run(self) -> None:
        """Run until everything has ended and nothing is held. Raises AssertionError if that takes too long."""
        end = TROUBLE + PATIENCE
        while self.time < end:
            await self.tick()
            if self._is_over():
                return
        self._explain()

    async def tick(self) -> None:
        self.clock.advance(TICK)
        self.network.tick()
        self._wake_and_start()
        if self._troubles and self.time >= self._troubles[0]:
            self._troubles.pop(0)
            self.happened.append(f"{self.time:.3f} {self._trouble()}")
        if self.time > TROUBLE:
            self.network.loss = 0.0
        busy = self._busy if self.time < TROUBLE else 0.0
        names = [name for name in self.parts if name not in self._wakes and self.chance.random() >= busy]
        self.chance.shuffle(names)
        for name in names:
            self._turn(name)
        await self._serve_clients()

    def _turn(self, name: str) -> None:
        part = self.parts[name]
        try:
            part.turn()
        except DiedError:
            self.happened.append(f"{self.time:.3f} {name} died")
            part.die()
        if part.gone:
            self._remove(name)

    def _remove(self, name: str) -> None:
        del self.parts[name]
        self._wakes.pop(name, None)
        self._starts[name] = self.time + self.chance.choice([0.0, 0.0, 0.05, 0.5, 2.0, 4.0])

    def _wake_and_start(self) -> None:
        self._wakes = {name: at for name, at in self._wakes.items() if at > self.time}
        for name, at in list(self._starts.items()):
            if self.time >= at:
                del self._starts[name]
                self.parts[name] = self.start(name, self.chance.choice([0.0, 0.3, 1.0]))

    def _is_over(self) -> bool:
        if self._to_do or self._to_encode or self._troubles or self._starts or self._wakes:
            return False
        if any(not each.task.done() for each in self.encoders if not each.frontend.gone):
            return False
        fronts = [part for part in self.parts.values() if isinstance(part, FrontendPart)]
        if any(each.manager.running or not each.manager.ready for each in fronts):
            return False
        return not any(self.held.values())

    @property
    def held(self) -> dict[str, int]:
        """Requests held by schedulers and detokenizers."""
        held = {}
        for name, part in self.parts.items():
            if isinstance(part, SchedulerPart):
                held[name] = part.held
            elif isinstance(part, DetokenizerPart):
                held[name] = len(part.manager)
        return held

    def _explain(self) -> None:
        fronts = [part for part in self.parts.values() if isinstance(part, FrontendPart)]
        running = {each.peer: (each.manager.running, each.manager.ready) for each in fronts}
        raise AssertionError(f"not over: {running}, {self.held}, after {self.happened}")

    # Clients.

    async def _serve_clients(self) -> None:
        while self._to_do and self._to_do[0].at <= self.time:
            job = self._to_do.pop(0)
            if not await self._submit(job):
                self._to_do.append(job)
                break
        while self._to_encode and self._to_encode[0] <= self.time:
            self._to_encode.pop(0)
            self._encode()
        for _ in range(3):
            await asyncio.sleep(0)
        for client in self.clients:
            if not client.frontend.gone and client.frontend.peer not in self._wakes:
                client.take()
                if client.done or client.leaves_at <= self.time:
                    client.frontend.manager.release(client.generation)

    def _frontend(self) -> FrontendPart | None:
        ready = [
            part
            for name, part in self.parts.items()
            if isinstance(part, FrontendPart) and not part.leaving and name not in self._wakes
        ]
        return self.chance.choice(ready) if ready else None

    async def _submit(self, job: Job) -> bool:
        frontend = self._frontend()
        if frontend is None:
            return False
        try:
            generation = await frontend.manager.submit([job.request()], f"{frontend.peer}-{job.number}")
        except (UnavailableError, ModelNotFoundError):  # a frontend that has just started knows only one of the models
            return False
        stays = self.chance.choice([0.1, 1.0, 5.0]) if self.chance.random() < 0.1 else float("inf")
        self.clients.append(Client(job, frontend, generation, self.time + stays))
        return True

    def _encode(self) -> None:
        frontend = self._frontend()
        if frontend is None or not any(model.name == "e" for model in frontend.manager.models):
            return
        inputs = [[self.chance.randrange(VOCABULARY) for _ in range(self.chance.randint(1, 30))] for _ in range(5)]
        request = EmbeddingRequest(model="e", inputs=[TokenInput(each) for each in inputs], params=["input"] * 5)
        self.encoders.append(Asked(frontend, inputs, asyncio.create_task(frontend.manager.embed(request))))

    # Faults.

    def _trouble(self) -> str:
        name = self.chance.choice(list(NAMES))
        kinds = {
            self._kill: 4,
            self._kill_in_work: 3,
            self._stop: 3,
            self._terminate: 2,
            self._cut: 2,
            self._kill_two: 2,
            self._sleep: 1,
        }
        [kind] = self.chance.choices(list(kinds), list(kinds.values()))
        return kind(name)

    def _kill(self, name: str) -> str:
        if part := self.parts.get(name):
            self.losses[name] += 1
            part.die()
            self._remove(name)
        return f"kill {name}"

    def _kill_two(self, name: str) -> str:
        other = self.chance.choice([each for each in NAMES if each != name])
        return f"{self._kill(name)}, {self._kill(other)}"

    def _kill_in_work(self, name: str) -> str:
        part = self.parts.get(name)
        if not isinstance(part, SchedulerPart):
            return self._kill(name)
        self.losses[name] += 1
        if self.chance.random() < 0.5:
            part.dies_in_step = True
            return f"kill {name} in a step"
        part.dies_sending = self.chance.randint(0, 10)
        return f"kill {name} sending"

    def _stop(self, name: str) -> str:
        seconds = self.chance.choice([0.5, 1.5, 2.2, 4.0, 8.0])
        self.losses[name] += 1
        if name in self.parts:
            self._wakes[name] = self.time + seconds
        return f"stop {name} for {seconds} s"

    def _terminate(self, name: str) -> str:
        if part := self.parts.get(name):
            part.terminate()
        return f"terminate {name}"

    def _cut(self, name: str) -> str:
        other = self.chance.choice([each for each in NAMES if each != name])
        seconds = self.chance.choice([0.5, 1.9, 3.0, 5.0])
        self.network.cut(name, other, round(seconds / TICK))
        self.losses.update([name, other])
        return f"cut {name} from {other} for {seconds} s"

    def _sleep(self, name: str) -> str:
        """Suspend the whole machine."""
        seconds = self.chance.choice([1.5, 5.0, 70.0])
        self.clock.advance(seconds)
        self._began += seconds
        return f"sleep for {seconds} s"
