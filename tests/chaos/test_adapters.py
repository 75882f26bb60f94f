"""`kill -9` while requests use more adapters than there are slots: each ends with its own text.

All are slow: in an ordinary run, `tests/e2e/test_adapters.py` kills parts during requests with adapters.
"""

import random
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest

from tercet.scheduler.model_files import resolve_model
from tercet.scheduler.testing.lora_checkpoints import write_adapter
from tests.chaos.conftest import References, Table, served
from tests.chaos.fault_injection import FaultInjection, assert_nothing_is_lost
from tests.chaos.load import FULL, SHORT, shuffled
from tests.chaos.parts import Parts, watched
from tests.server_process import Server

NAMES = ["", "a0", "a1", "a2", "a3"]
pytestmark = pytest.mark.slow
LONG = pytest.mark.timeout(7200)


@pytest.fixture(scope="module")
def with_adapters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server of one scheduler with slots for two adapters of four."""
    base, root = resolve_model("embedded"), tmp_path_factory.mktemp("adapters")
    written = {name: write_adapter(root / name, base, seed=seed, size=0.02) for seed, name in enumerate(NAMES[1:])}
    named = [word for name, path in written.items() for word in ("--lora", f"{name}={path}")]
    for server in served(*named, "--max-loras", "2", "--response-store", str(root / "responses.sqlite")):
        deadline = time.monotonic() + 30
        while len(server.get("/v1/models")["data"]) < len(NAMES):
            assert time.monotonic() < deadline, server.lines[-20:]
            time.sleep(0.1)
        yield server


@pytest.fixture
async def parts(with_adapters: Server) -> AsyncIterator[Parts]:
    with watched(with_adapters) as parts:
        await parts.ready()
        yield parts


@pytest.mark.parametrize(("count", "seed"), [(SHORT, 0), pytest.param(FULL, 1, marks=LONG)])
@pytest.mark.parametrize("role", ["scheduler", "detokenizer"])
async def test_every_request_goes_on_with_its_own_adapter(
    parts: Parts, references: References, table: Table, role: str, count: int, seed: int
) -> None:
    jobs = [replace(job, lora=NAMES[job.number % len(NAMES)]) for job in shuffled(count, seed)]
    await assert_nothing_is_lost(parts, references, table, FaultInjection(parts, role), jobs, random.Random(seed))
