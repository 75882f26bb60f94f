"""Parts die, hang, leave and return in any order: every client of a surviving frontend gets its own answer."""

import asyncio

import pytest
from tokenizers import Tokenizer

from tercet.protocol.messages.values import FinishType, pack_floats, pack_ints, unpack_floats
from tercet.scheduler.core.embedding.plan import EncodeRow
from tercet.scheduler.testing import FakeEncoder, FakeExecutor
from tests.crash_simulation import Client, CrashSimulation, Job
from tests.lossy_simulation import tokenizer_file
from tests.simulated_parts import CAPACITY, ENCODES, SchedulerPart, script

MODEL = FakeExecutor(CAPACITY, grammar=script)
TOKENIZER = Tokenizer.from_str(tokenizer_file().decode())


def expected(job: Job, index: int) -> tuple[str, list[int]]:
    """Return the text and ids that a choice must have."""
    tokens = list(job.prompt)
    while len(tokens) < len(job.prompt) + job.tokens:
        must, ends = script(tokens) if job.guided else ((), False)
        if ends:
            break
        tokens.append(must[0] if must else MODEL.next_token(tokens, index))
        text = TOKENIZER.decode(tokens[len(job.prompt) :], skip_special_tokens=False)
        found = [text.find(stop) for stop in job.stop if stop in text]
        if found:
            return text[: min(found)], tokens[len(job.prompt) :]
    ids = tokens[len(job.prompt) :]
    return TOKENIZER.decode(ids, skip_special_tokens=False), ids


def check(client: Client) -> None:
    job, [state] = client.job, client.generation.states
    for index in range(job.n):
        text, ids = expected(job, index)
        assert client.ids.get(index, []) == ids, (job, index)
        assert client.texts.get(index, "") == text, (job, index)
        assert client.finishes[index].type in {FinishType.STOP, FinishType.LENGTH}
        if job.scored:
            assert client.logprobs.get(index, []) == [-float(at) for at in range(len(ids))]
    assert state.prompt_tokens == len(job.prompt)
    if job.scored and ids:
        assert state.prompt_logprobs is not None
        assert list(unpack_floats(state.prompt_logprobs.chosen))[1:] == [-float(at) for at in range(1, len(job.prompt))]


def play(seed: int) -> CrashSimulation:
    async def scenario() -> CrashSimulation:
        simulation = CrashSimulation(seed)
        await simulation.run()
        return simulation

    simulation = asyncio.run(scenario())
    alive = [
        each
        for each in simulation.clients
        if each.done or not (each.frontend.gone or each.leaves_at <= simulation.time)
    ]
    for client in alive:
        assert client.error is None, (client.job, client.error, simulation.happened)
        check(client)
    for asked in simulation.encoders:
        if asked.task.done() and not asked.task.cancelled():
            batch = asked.task.result()
            rows = [EncodeRow(pack_ints(each)) for each in asked.inputs]
            assert batch.vectors == [pack_floats(FakeEncoder(ENCODES).vector(row)) for row in rows]
    for part in simulation.parts.values():
        if isinstance(part, SchedulerPart):
            part.assert_empty()
    return simulation


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 12))])
def test_whatever_happens_to_parts(seed: int) -> None:
    simulation = play(seed)
    assert len(simulation.happened) > 1
    assert sum(client.done for client in simulation.clients) > len(simulation.clients) / 3


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("first", range(100, 2000, 100))
def test_whatever_happens_to_parts_for_a_long_time(first: int) -> None:
    for seed in range(first, first + 100):
        try:
            play(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
