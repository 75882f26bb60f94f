"""Processes that meet in shared memory; here they are threads, each with a place of its own."""

import mmap
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tercet.kernels.native.library import load_library, missing_library
from tercet.kernels.native.shm_collectives import ShmCollectives, shm_bytes

pytestmark = pytest.mark.skipif(bool(missing_library()), reason=missing_library())
ROOM = 256


def together(size: int, run: Callable[[ShmCollectives, int], torch.Tensor]) -> list[torch.Tensor]:
    """What `run` gives each of `size` that meet."""
    library = load_library()
    memory = mmap.mmap(-1, shm_bytes(library, size, ROOM))
    meetings = [ShmCollectives(library, rank, size, memory, ROOM) for rank in range(size)]
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, meetings, range(size)))


def some(rank: int, turn: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    chance = torch.Generator().manual_seed(100 * rank + turn)
    return torch.randn(*shape, generator=chance).to(dtype)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 3, 63, 64, 65, 200, 1000])
def test_sums_are_of_float32_in_the_order_of_ranks(size: int, dtype: torch.dtype, count: int) -> None:
    expected = some(0, 0, count, dtype=dtype).float()
    for rank in range(1, size):
        expected += some(rank, 0, count, dtype=dtype).float()
    for total in together(size, lambda meeting, rank: meeting.sum(some(rank, 0, count, dtype=dtype))):
        assert total.dtype == dtype
        assert torch.equal(total, expected.to(dtype))


@pytest.mark.parametrize("size", [2, 3])
def test_gathers_are_in_the_order_of_ranks(size: int) -> None:
    def run(meeting: ShmCollectives, rank: int) -> torch.Tensor:
        return meeting.gather(some(rank, 1, *shape))

    for shape in ((5,), (3, 40), (2, 3, 50)):
        expected = torch.stack([some(rank, 1, *shape) for rank in range(size)])
        assert all(torch.equal(whole, expected) for whole in together(size, run))


def test_ranks_do_not_overwrite_buffers_that_others_read() -> None:
    """Each is late at other times."""
    turns = 200

    def run(meeting: ShmCollectives, rank: int) -> torch.Tensor:
        chance = random.Random(rank)
        results = []
        for turn in range(turns):
            if chance.random() < 0.2:
                time.sleep(chance.random() * 2e-3)
            x = some(rank, turn, 16 + turn % 3)
            results.append(meeting.sum(x) if turn % 3 else meeting.gather(x).sum(0))
        return torch.cat(results)

    sums = [torch.stack([some(rank, turn, 16 + turn % 3) for rank in range(3)]).sum(0) for turn in range(turns)]
    for results in together(3, run):
        torch.testing.assert_close(results, torch.cat(sums))


def test_non_contiguous_inputs_are_unchanged() -> None:
    def run(meeting: ShmCollectives, rank: int) -> torch.Tensor:
        x = some(rank, 2, 4, 6)
        total = meeting.sum(x[:, ::2])
        assert torch.equal(x, some(rank, 2, 4, 6))
        return total

    for total in together(2, run):
        torch.testing.assert_close(total, (some(0, 2, 4, 6) + some(1, 2, 4, 6))[:, ::2])


@pytest.mark.parametrize(("rank", "size", "room", "length"), [(2, 2, 64, 4096), (0, 2, 96, 4096), (0, 2, 2048, 4096)])
def test_a_place_that_does_not_exist_is_refused(rank: int, size: int, room: int, length: int) -> None:
    with pytest.raises(ValueError, match="cannot meet others in 4096 bytes"):
        ShmCollectives(load_library(), rank, size, mmap.mmap(-1, length), room)
