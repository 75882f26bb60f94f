"""`kill -9` of a serving part of a model with recurrent states, which are lost with it: each text is the reference.

All are slow: an ordinary run computes states anew after retractions, in `packages/scheduler/tests/generation`.
"""

import random
from collections.abc import AsyncIterator, Iterator

import pytest

from packages.scheduler.tests.conftest import make_checkpoint
from tests.chaos.conftest import References, Table, served
from tests.chaos.fault_injection import FaultInjection, assert_nothing_is_lost
from tests.chaos.load import FULL, SHORT, shuffled
from tests.chaos.parts import Parts, watched
from tests.server_process import Server

pytestmark = pytest.mark.slow
LONG = pytest.mark.timeout(7200)


@pytest.fixture(scope="module")
def references() -> References:
    """The texts of this model, in place of the embedded one's."""
    return References()


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server of one scheduler, for a tiny random Qwen3.5."""
    yield from served(model=str(make_checkpoint("qwen3_5", tmp_path_factory.mktemp("qwen3_5"))))


@pytest.fixture
async def parts(hybrid: Server) -> AsyncIterator[Parts]:
    with watched(hybrid) as parts:
        await parts.ready()
        yield parts


@pytest.mark.parametrize(("count", "seed"), [(SHORT, 0), *(pytest.param(FULL, seed, marks=LONG) for seed in (1, 2))])
@pytest.mark.parametrize("role", ["scheduler", "detokenizer"])
async def test_every_request_goes_on_from_a_new_state(
    parts: Parts, references: References, table: Table, role: str, count: int, seed: int
) -> None:
    fault = FaultInjection(parts, role)
    await assert_nothing_is_lost(parts, references, table, fault, shuffled(count, seed), random.Random(seed))
