"""Any message may be lost, duplicated, delayed or overtaken: every request ends exactly once, with its own output.

The network is simulated; the scheduler, the detokenizer and the frontend are real.
"""

import asyncio
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from packages.kernels.tests.pairwise import alternating
from packages.protocol.tests.extents import extents
from tercet.frontend.manager.counters import RequestOutcome
from tercet.frontend.manager.req_state import Generation
from tercet.frontend.manager.request import GenerateRequest, GenerationOptions
from tercet.frontend.model.prompts import TokenPrompt
from tercet.protocol.messages.values import FinishReason
from tests.lossy_simulation import Closed, Fate, LossySimulation, Name, tokenizer_file

TWO_SECONDS = 40
"""In ticks."""
LIMIT = 2000
"""Ticks (a hundred seconds) in which everything must have ended."""


@dataclass(frozen=True)
class Job:
    """Request, and the tick at which it is sent."""

    at: int
    prompt: tuple[int, ...]
    n: int = 1
    tokens: int = 12
    stop: tuple[str, ...] = ()


JOBS = (
    Job(0, tuple(range(40, 70))),
    Job(1, (*range(40, 60), 7, 8), n=2, tokens=9),
    Job(4, (5, 6, 7), tokens=20, stop=("a", "th")),
    Job(6, tuple(range(40, 70)), tokens=1),
    Job(9, (9, 9), n=3, tokens=6),
    Job(10, (30, 31), tokens=90),
    Job(11, (81, 82, 83), tokens=150, stop=("e", "o")),
)

Answer = list[tuple[str, list[int], FinishReason | None]]
"""Text, ids and finish of each choice."""


class Client:
    """Consumer of one request's output."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        [self.state] = generation.states
        self.texts = {choice.index: "" for choice in self.state.choices}
        self.ids: dict[int, list[int]] = {choice.index: [] for choice in self.state.choices}
        self.finishes: dict[int, FinishReason | None] = dict.fromkeys(self.texts)
        self.stall = 0
        """Longest time without output, in ticks."""
        self._quiet = 0

    def take(self) -> None:
        news = self.state.pop_updates()
        self._quiet = 0 if news else self._quiet + 1
        self.stall = max(self.stall, self._quiet)
        for update in news:
            assert self.finishes[update.index] is None, "a choice went on after its end"
            self.texts[update.index] += update.text
            self.ids[update.index] += update.token_ids
            self.finishes[update.index] = update.finish

    @property
    def answer_open(self) -> bool:
        """Return whether some choice has not finished."""
        return None in self.finishes.values()

    @property
    def answer(self) -> Answer:
        return [(self.texts[index], self.ids[index], self.finishes[index]) for index in self.texts]


async def submit(simulation: LossySimulation, job: Job) -> Client:
    options = GenerationOptions(n=job.n, max_tokens=job.tokens, ignore_eos=True, stop=list(job.stop), seed=1)
    request = GenerateRequest(model="m", prompt=TokenPrompt(list(job.prompt)), options=options)
    return Client(await simulation.manager.submit([request]))


@dataclass
class Played:
    """Result of a run."""

    simulation: LossySimulation
    clients: list[Client]
    lingered: int
    """Ticks after the last end in which parts still held something."""

    @property
    def answers(self) -> list[Answer]:
        return [client.answer for client in self.clients]

    @property
    def stall(self) -> int:
        return max(client.stall for client in self.clients)


async def play(simulation: LossySimulation) -> Played:
    """Run every job to its end, then until nothing is held."""
    await simulation.begin(lambda: asyncio.sleep(0))
    clients: list[Client] = []
    lingered = 0
    for tick in range(LIMIT):
        clients += [await submit(simulation, job) for job in JOBS if job.at == tick]
        simulation.tick()
        for client in clients:
            if client.answer_open:
                client.take()
            if client.state.done:
                simulation.manager.release(client.generation)
        if len(clients) == len(JOBS) and not simulation.manager.running:
            if not simulation.held:
                break
            lingered += 1
    else:
        raise AssertionError(
            f"{simulation.manager.running} requests have not ended, {simulation.held} choices are held"
        )
    for part in simulation.schedulers.values():
        memory = part.core.memory
        assert memory.pools.free + memory.cache.cached == memory.pools.total
    assert simulation.manager.counters.outcomes == {RequestOutcome.FINISHED: len(JOBS)}
    return Played(simulation, clients, lingered)


def run(
    fates: Mapping[Name, Fate], overlap: int = 0, closed: Sequence[Closed] = (), *, disagree: bool = False
) -> Played:
    async def scenario() -> Played:
        return await play(LossySimulation(fates, overlap, closed, disagree))

    return asyncio.run(scenario())


@functools.cache
def unbroken() -> list[Answer]:
    return run({}).answers


@functools.cache
def names(overlap: int) -> list[Name]:
    """Return every message of a run without a fault."""
    return run({}, overlap).simulation.wire.names


def test_without_a_fault_nothing_is_dispatched_twice() -> None:
    played = run({})
    assert played.simulation.manager.counters.redispatches == {}
    model = played.simulation.schedulers["scheduler-0"].executor
    for job, answer in zip(JOBS, played.answers, strict=True):
        for index, (_, ids, finish) in enumerate(answer):
            assert finish is not None
            tokens = list(job.prompt)
            for _ in ids:
                tokens.append(model.next_token(tokens, index))
            assert ids == tokens[len(job.prompt) :]
            assert len(ids) == job.tokens or finish.matched in job.stop
    stopped = [len(ids) for answer in played.answers for _, ids, finish in answer if finish and finish.matched]
    assert min(stopped) < max(stopped) < 60


FATES = {"lost": Fate(copies=0), "doubled": Fate(copies=2), "overtaken": Fate(late=2), "late": Fate(late=30)}


@pytest.mark.parametrize(("fate", "overlap"), alternating([*FATES], [0, 1]))
@pytest.mark.parametrize("every", [40, pytest.param(1, marks=pytest.mark.slow)])
def test_any_single_message_may_be(every: int, fate: str, overlap: int) -> None:
    """Every message of a run in turn: none is needed, and no fault costs more than two seconds."""
    few = [name for name in names(overlap) if name[0] in {"request", "other"}]
    for name in [*few, *names(overlap)[::every]]:
        played = run({name: FATES[fate]}, overlap)
        assert played.answers == unbroken(), (name, played.simulation.manager.counters.redispatches)
        assert played.stall <= TWO_SECONDS, name
        assert played.lingered <= TWO_SECONDS, name


mistreated = st.dictionaries(
    st.tuples(st.sampled_from(["request", "ids", "text", "heartbeat", "other"]), st.integers(0, 120)),
    st.builds(Fate, copies=st.integers(0, 2), late=st.sampled_from([0, 1, 2, 3, 10, 40])),
    max_size=40,
)
full_queues = st.lists(
    st.builds(Closed, st.sampled_from(["scheduler-0", "scheduler-1"]), st.integers(0, 100), st.integers(1, 60)),
    max_size=4,
)


@extents(15, 400)
def test_any_number_of_messages_may_be_mistreated(extent: settings) -> None:
    @extent
    @given(fates=mistreated, closed=full_queues, overlap=st.integers(0, 1))
    def check(fates: dict[Name, Fate], closed: list[Closed], overlap: int) -> None:
        played = run(fates, overlap, closed)
        assert played.answers == unbroken(), played.simulation.manager.counters.redispatches

    check()


@extents(15, 400)
def test_schedulers_that_disagree_never_get_mixed_up(extent: settings) -> None:
    @extent
    @given(fates=mistreated, closed=full_queues, overlap=st.integers(0, 1))
    def check(fates: dict[Name, Fate], closed: list[Closed], overlap: int) -> None:
        check_tokens(run(fates, overlap, closed, disagree=True))

    check()


def check_tokens(played: Played) -> None:
    """Assert that a token is one scheduler's continuation of the tokens before it, and that the text matches them."""
    model = played.simulation.schedulers["scheduler-0"].executor
    tokenizer = Tokenizer.from_str(tokenizer_file().decode())
    for job, answer in zip(JOBS, played.answers, strict=True):
        for index, (text, ids, finish) in enumerate(answer):
            tokens = list(job.prompt)
            for token in ids:
                said = model.next_token(tokens, index)
                assert token in {said, (said + 1) % played.simulation.capacity.vocab_size}
                tokens.append(token)
            whole = tokenizer.decode(ids, skip_special_tokens=False)
            stop = finish.matched if finish else None
            assert text == (whole.partition(stop)[0] if isinstance(stop, str) else whole)
