"""`kill -9` of a serving part, or of the helper that decodes, while a third of the requests has images."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator

import psutil
import pytest

pytest.importorskip("PIL")

from packages.scheduler.tests.models.vision.checkpoint import write_gemma3
from tests.chaos.conftest import References, Table, served
from tests.chaos.fault_injection import FaultInjection, assert_nothing_is_lost, failures
from tests.chaos.load import FULL, SHORT, ImageChat, Load, shuffled
from tests.chaos.output_check import OutputCheck
from tests.chaos.parts import Parts, assert_nothing_is_left, watched
from tests.server_process import Server

LONG = [pytest.mark.slow, pytest.mark.timeout(7200)]
CASES = [(SHORT, 0), *(pytest.param(FULL, seed, marks=LONG) for seed in (1, 2))]
HELPER = "tercet.frontend.media.image_worker"


@pytest.fixture(scope="module")
def references() -> References:
    """The texts of this model, in place of the embedded one's."""
    return References()


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server of one part of each role, for a tiny random Gemma 3."""
    yield from served(model=str(write_gemma3(tmp_path_factory.mktemp("images") / "seeing")))


@pytest.fixture
async def parts(seeing: Server) -> AsyncIterator[Parts]:
    with watched(seeing) as parts:
        await parts.ready()
        yield parts


@pytest.mark.parametrize(("count", "seed"), CASES)
@pytest.mark.parametrize("role", ["scheduler", pytest.param("detokenizer", marks=pytest.mark.slow)])
async def test_every_request_goes_on_with_its_images(
    parts: Parts, references: References, table: Table, role: str, count: int, seed: int
) -> None:
    fault = FaultInjection(parts, role)
    jobs = shuffled(count, seed, images=True)
    await assert_nothing_is_lost(parts, references, table, fault, jobs, random.Random(seed))


def helpers(parts: Parts) -> list[psutil.Process]:
    """Return the processes that decode images."""
    return [each for each in psutil.Process(parts.pids()["frontend-0"]).children() if HELPER in each.cmdline()]


async def kill_helpers(parts: Parts, times: int) -> None:
    """Kill the first helper that appears, which was started for an order; after that any, two seconds apart."""
    for time in range(times):
        while not (alive := helpers(parts)):  # noqa: ASYNC110 - nothing reports it
            await asyncio.sleep(0.005)
        alive[time % len(alive)].kill()
        await asyncio.sleep(2.0 if time < times - 1 else 0.0)


@pytest.mark.parametrize(("count", "seed"), CASES)
async def test_images_are_decoded_again_after_the_death_of_a_helper(
    parts: Parts, references: References, table: Table, count: int, seed: int
) -> None:
    jobs = shuffled(count, seed, images=True)
    expected = await references.of(parts.server.url, jobs)
    for idle in (found := helpers(parts)):
        idle.kill()
    psutil.wait_procs(found, 10)
    outcomes = await Load(parts.server.url).run(jobs, lambda: kill_helpers(parts, 1 if count == SHORT else 20))
    failed = [each for each in outcomes if not each.finished]
    table.add(f"{len(outcomes)} requests, {len(failed)} failed")
    assert all("Images cannot be processed now." in each.error for each in failed), failures(outcomes)
    assert not failed or count == FULL, "only the second death is told to a client"
    verdict = OutputCheck(parts.server.url, expected).compare([each for each in outcomes if each.finished])
    assert verdict.ties <= max(1, verdict.texts // 500)
    assert any("the work is repeated" in line for line in parts.server.lines)
    assert_nothing_is_left(await parts.idle())


async def test_a_changed_token_of_a_chat_with_images_is_found(parts: Parts, references: References) -> None:
    job = ImageChat(0, 20)
    check = OutputCheck(parts.server.url, await references.of(parts.server.url, [job]))
    [right] = await Load(parts.server.url).run([job])
    assert check.compare([right]).ties == 0
    right.ids[0][9] += 1
    with pytest.raises(AssertionError, match="instead of"):
        check.compare([right])
