"""`kill -9` of a part of a server whose images are encoded by a scheduler of their own: every text is the same."""

import random
from collections.abc import AsyncIterator, Iterator

import pytest

pytest.importorskip("PIL")

from packages.scheduler.tests.models.vision.checkpoint import write_gemma3
from tests.chaos.conftest import References, Table, served
from tests.chaos.fault_injection import FaultInjection, assert_nothing_is_lost
from tests.chaos.load import FULL, SHORT, shuffled
from tests.chaos.parts import Parts, watched
from tests.server_process import Server

LONG = [pytest.mark.slow, pytest.mark.timeout(7200)]
CASES = [(SHORT, 0), *(pytest.param(FULL, seed, marks=LONG) for seed in (1, 2))]
LANGUAGE, ENCODER = "scheduler-0", "scheduler-1"


@pytest.fixture(scope="module")
def references() -> References:
    """The texts of this model, in place of the embedded one's."""
    return References()


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server of one part of each kind, for a tiny random Gemma 3."""
    yield from served("--encoders", "1", model=str(write_gemma3(tmp_path_factory.mktemp("images") / "seeing")))


@pytest.fixture
async def parts(split: Server) -> AsyncIterator[Parts]:
    with watched(split) as parts:
        await parts.ready()
        yield parts


@pytest.mark.parametrize(("count", "seed"), CASES)
@pytest.mark.parametrize("part", [LANGUAGE, ENCODER, pytest.param("detokenizer", marks=pytest.mark.slow)])
async def test_every_request_goes_on_with_its_images(
    parts: Parts, references: References, table: Table, part: str, count: int, seed: int
) -> None:
    fault = FaultInjection(parts, part)
    jobs = shuffled(count, seed, images=True)
    enough = 0 if part == ENCODER else 2
    await assert_nothing_is_lost(parts, references, table, fault, jobs, random.Random(seed), enough=enough)
    assert fault.name == {"detokenizer": "detokenizer-0"}.get(part, part)
