"""What native latent attention promises beyond being right: equal bits however a step is put together, and bounds."""

from itertools import cycle, islice

import pytest
import torch

from tercet.kernels.attention.api import AttentionBatch, AttentionParams
from tercet.kernels.attention.cpu import CpuLatent
from tercet.kernels.attention.latent import latent_caches
from tercet.kernels.attention.torch_native import TorchNativeLatent
from tercet.kernels.native.library import Library
from tercet.kernels.tools.check import make_batch

CPU = torch.device("cpu")
PAGE = 8
RANK, WIDTH = 72, 88


def attend(
    backend: CpuLatent | TorchNativeLatent, batch: AttentionBatch, heads: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Random queries and vectors, the same for the same positions of the first row."""
    cache = torch.randn(400, PAGE, WIDTH, generator=torch.Generator().manual_seed(3)).to(dtype)
    q = torch.randn(1000, heads, WIDTH, generator=torch.Generator().manual_seed(4))
    first = batch.host_kv_lens[0] - batch.host_query_lens[0]
    backend.plan(batch)
    new = q[first : first + sum(batch.host_query_lens)]
    return backend.attend(new, *latent_caches(cache, RANK), AttentionParams(scale=0.1))


@pytest.mark.parametrize("rows", [[(1, 600)], [(1, 900), (1, 3), (1, 258)], [(20, 300), (1, 1), (13, 700)]])
@pytest.mark.parametrize("heads", [3, 16, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_instruction_set_equals_torch(
    library: Library, rows: list[tuple[int, int]], heads: int, dtype: torch.dtype
) -> None:
    batch = make_batch(rows, PAGE, CPU)
    expected = attend(TorchNativeLatent(), batch, heads, dtype)
    step = 1e-5 if dtype == torch.float32 else 2**-7  # queries and weights are rounded, too
    torch.testing.assert_close(attend(CpuLatent(library), batch, heads, dtype), expected, rtol=step, atol=step)


@pytest.mark.parametrize("heads", [5, 16])
def test_results_are_bitwise_equal_in_any_chunk_batch_and_thread_count(library: Library, heads: int) -> None:
    backend, threads = CpuLatent(library), library.threads
    whole = attend(backend, make_batch([(700, 700)], PAGE, CPU), heads)
    try:
        for count in (1, 3):
            library.set_threads(count)
            others = islice(cycle([[], [(5, 60), (1, 900)], [(1, 30)] * 40]), count, None)
            for new, kv_len in [(1, 700), (1, 256), (1, 257), (7, 640), (90, 513)]:
                out = attend(backend, make_batch([(new, kv_len), *next(others)], PAGE, CPU), heads)
                assert torch.equal(out[:new], whole[kv_len - new : kv_len])
    finally:
        library.set_threads(threads)


def test_nothing_outside_the_cache_is_read(library: Library) -> None:
    batch = make_batch([(1, 9)], PAGE, CPU)
    batch.page_table[0, 1] = 2
    backend = CpuLatent(library)
    backend.plan(batch)
    with pytest.raises(ValueError, match="a page is not in the cache"):
        backend.attend(torch.zeros(1, 2, 48), *latent_caches(torch.zeros(2, PAGE, 48), 32), AttentionParams(scale=1.0))


def test_shapes_that_do_not_fit_are_refused(library: Library) -> None:
    backend, q, cache = CpuLatent(library), torch.zeros(1, 2, 48), torch.zeros(2, PAGE, 48)
    backend.plan(make_batch([(1, 3)], PAGE, CPU))
    for queries, vectors, rank in [
        (q[..., :47], cache, 32),
        (torch.zeros(2, 2, 48), cache, 32),
        (q, cache[:, ::2], 32),
        (q, cache.transpose(1, 2), 32),
        (q, cache, 49),
        (q, cache, 0),
    ]:
        with pytest.raises(ValueError, match=r"fit|queries|contiguous"):
            backend.attend(queries, vectors[:, :, None], torch.zeros(2, PAGE, 1, rank), AttentionParams(scale=1.0))
