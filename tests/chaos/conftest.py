"""Servers whose parts are killed, reference outputs of unbroken runs, and a table of figures."""

import logging
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from pathlib import Path

import pytest

from tercet.protocol.messages.values import Role
from tests.chaos.load import Job, Load
from tests.chaos.output_check import Ids
from tests.chaos.parts import Parts, watched
from tests.server_process import Server

logger = logging.getLogger(__name__)

BFLOAT16 = ("--dtype", "bfloat16", "--kv-cache-bytes", "64MiB", "--threads", "1")
OPTIONS = ("--dtype", "float32", *BFLOAT16[2:])
"""One thread per part: threads that wait for one another are slow when other processes use the same cores."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


class References:
    """Token ids of every job from an unbroken server, requested once."""

    def __init__(self) -> None:
        self._known: dict[Job, Ids] = {}

    async def of(self, url: str, jobs: Sequence[Job]) -> dict[Job, Ids]:
        missing = [job for job in jobs if job not in self._known]
        for outcome in await Load(url, clients=16).run(missing):
            assert outcome.finished, outcome.error
            self._known[outcome.job] = outcome.ids
        return {job: self._known[job] for job in jobs}


@pytest.fixture(scope="session")
def references() -> References:
    return References()


@pytest.fixture(scope="session")
def one_of_each() -> Iterator[Server]:
    """Yield a server whose frontend gives a scheduler that joins its turn, whatever the others have cached."""
    yield from served("--frontend.routing-policy", "round_robin")


@pytest.fixture(scope="session")
def two_of_each() -> Iterator[Server]:
    yield from served("--dp-size", "2", "--detokenizer-workers", "2", "--frontend-workers", "2")


def served(
    *options: str,
    model: str = "embedded",
    program: Sequence[str] = (),
    port: int = 0,
    common: Sequence[str] = OPTIONS,
) -> Iterator[Server]:
    """Yield a server until the fixture ends."""
    server = Server(model, *common, *options, env=ENVIRONMENT, program=program, port=port)
    try:
        yield server.wait()
        assert server.stop() == 0, "\n".join(server.lines[-50:])
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.wait_for_end(10)


@pytest.fixture
def crashing() -> Iterator[Server]:
    """Yield a server whose scheduler dies of one prompt: see `crashing_scheduler.py`."""
    yield from served(program=_rebuilt("crashing_scheduler.py", Role.SCHEDULER))


@pytest.fixture
def lossy() -> Iterator[Server]:
    """Yield a server whose parts lose one message in a hundred: see `lossy_part.py`."""
    yield from served(program=_rebuilt("lossy_part.py", Role.SCHEDULER, Role.DETOKENIZER, Role.FRONTEND))


def _rebuilt(program: str, *roles: Role) -> Sequence[str]:
    here = Path(__file__).with_name("programs")
    return str(here / "rebuilt_server.py"), str(here / program), ",".join(roles)


@pytest.fixture
async def single(one_of_each: Server) -> AsyncIterator[Parts]:
    """Yield the small server with every part ready."""
    with watched(one_of_each) as parts:
        await parts.ready()
        yield parts


@pytest.fixture
async def double(two_of_each: Server) -> AsyncIterator[Parts]:
    """Yield the large server with every part ready."""
    with watched(two_of_each) as parts:
        await parts.ready()
        yield parts


class Table:
    """Figures for the end of the run. They travel with a test's report, because the test may run in another process."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item

    def add(self, figures: str) -> None:
        logger.info("%s: %s", self._item.name, figures)
        self._item.user_properties.append(("figures", figures))


@pytest.fixture
def table(request: pytest.FixtureRequest) -> Table:
    return Table(request.node)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the servers' output to the report of a failed test."""
    report = yield
    if report.failed and isinstance(item, pytest.Function):
        for value in item.funcargs.values():
            if isinstance(value, Parts):
                report.sections.append(("server", "\n".join(value.server.lines[-80:])))
    return report
