"""The collectives between two real processes, against the same sums and columns made in one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from packages.scheduler.tests.executor.ranks.collectives_peer import DTYPES, SUMMED, given, play
from tercet.kernels.native.library import missing_library
from tercet.scheduler.executor.ranks.collectives import ProgressCollectives
from tercet.scheduler.models.layers.shard import SingleRankCollectives

Told = dict[str, Any]


NATIVE = pytest.mark.skipif(bool(missing_library()), reason=missing_library())


@pytest.fixture(scope="module", params=["gloo", pytest.param("shared memory", marks=NATIVE)])
def told(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[Told, Told]:
    """What ranks 0 and 1 were given."""
    directory = tmp_path_factory.mktemp("ranks")
    program = Path(__file__).with_name("collectives_peer.py")
    with subprocess.Popen([sys.executable, program, directory, request.param], stdout=subprocess.PIPE) as peer:
        mine = play(0, directory, request.param)
        output, _ = peer.communicate(timeout=60)
    return mine, json.loads(output)


def test_all_ranks_are_given_the_same_bits(told: tuple[Told, Told]) -> None:
    mine, others = ({name: x for name, x in each.items() if not name.startswith("exchanged")} for each in told)
    assert mine == others


def test_rows_reach_the_ranks_that_they_are_for(told: tuple[Told, Told]) -> None:
    mine, other = told
    if "exchanged empty" not in mine:
        pytest.skip("shared memory has no all-to-all")
    assert mine["exchanged uneven"] == [[0, 1, 2], [100, 101, 102], [103, 104, 105], [106, 107, 108]]
    assert other["exchanged uneven"] == [[3, 4, 5], [6, 7, 8]]
    assert (mine["exchanged one way"], other["exchanged one way"]) == ([], [[0, 1, 2], [3, 4, 5]])
    assert mine["exchanged empty"] == other["exchanged empty"] == []


@pytest.mark.parametrize("name", DTYPES)
def test_sums_columns_and_what_rank_0_has(name: str, told: tuple[Told, Told]) -> None:
    mine, dtype = told[0], DTYPES[name]
    a, b = (given(rank, dtype) for rank in range(2))
    if name in SUMMED:
        assert mine[f"sum {name}"] == mine[f"view {name}"] == (a + b).double().tolist()
    assert mine[f"gathered {name}"] == torch.cat([a, b], 1).double().tolist()
    assert mine[f"broadcast {name}"] == a.double().tolist()


def test_the_smallest_number(told: tuple[Told, Told]) -> None:
    assert told[0]["smallest"] == [6, 2**40, -1]


def test_nothing_listens_beyond_loopback(told: tuple[Told, Told]) -> None:
    assert told[1]["listens"] in (["0100007F"], []), "127.0.0.1, or no socket at all"


def test_every_collective_of_a_step_is_a_sign_of_life() -> None:
    signs: list[int] = []
    collectives = ProgressCollectives(SingleRankCollectives(), lambda: signs.append(1))
    x = torch.ones(2, 3)
    for number, collective in enumerate((collectives.all_reduce, collectives.all_gather, collectives.broadcast), 1):
        assert collective(x) is x
        assert len(signs) == number
    assert collectives.all_reduce_min(4) == 4
