"""Memory does not grow with the number of requests served, once every page of the cache has been written."""

from dataclasses import dataclass

import pytest

from tests.chaos.conftest import Table
from tests.chaos.fault_injection import failures
from tests.chaos.load import Job, Load
from tests.chaos.parts import Parts, assert_nothing_is_left

MIB = 1 << 20


@dataclass(frozen=True)
class LongPrompt(Job):
    """Job that writes many pages in a few steps: sixteen write more than there are."""

    @property
    def prompt(self) -> str:
        return super().prompt * 100


@pytest.mark.parametrize(
    ("warm", "count", "bound"),
    [
        pytest.param(20, 120, 12 * MIB, id="short"),
        pytest.param(2000, 10_000, 4 * MIB, id="full", marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
async def test_no_part_grows(single: Parts, table: Table, warm: int, count: int, bound: int) -> None:
    sizes = []
    warming = [*(LongPrompt(number, 4) for number in range(16)), *(Job(number, 4) for number in range(warm))]
    for jobs in (warming, [Job(number, tokens=4) for number in range(warm, warm + count)]):
        outcomes = await Load(single.server.url, clients=16).run(jobs)
        assert failures(outcomes) == []
        assert_nothing_is_left(await single.idle())
        sizes.append(single.memory())
    before, after = sizes
    growth = {name: after[name] - before[name] for name in single.names}
    table.add(", ".join(f"{name} {after[name] / MIB:.0f} MiB ({growth[name] / MIB:+.1f})" for name in single.names))
    assert max(growth.values()) < bound, growth
