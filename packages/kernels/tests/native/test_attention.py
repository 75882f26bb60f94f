"""What native attention promises beyond being right: equal bits however a step is put together, and bounds."""

from itertools import cycle, islice

import pytest
import torch

from packages.kernels.tests.attention.freed_pages import poison_freed_pages
from packages.kernels.tests.pairwise import pairwise
from tercet.kernels.attention.api import AttentionBatch, AttentionParams
from tercet.kernels.attention.cpu import CpuAttention
from tercet.kernels.attention.torch_native import TorchNativeAttention
from tercet.kernels.native.library import Library
from tercet.kernels.tools.check import make_batch

CPU = torch.device("cpu")
PAGE = 8
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 24


def attend(
    backend: CpuAttention | TorchNativeAttention,
    batch: AttentionBatch,
    *,
    window: int = 0,
    dtype: torch.dtype = torch.float32,
    head_dim: int = HEAD_DIM,
) -> torch.Tensor:
    """Attend with random queries, keys and values, which are the same for the same positions of the first row."""
    generator = torch.Generator().manual_seed(3)
    k, v = torch.randn(2, 400, batch.page_size, KV_HEADS, head_dim, generator=generator).to(dtype).unbind()
    poison_freed_pages(batch, window, k, v)
    tokens = sum(batch.host_query_lens)
    q = torch.randn(1000, HEADS, head_dim, generator=torch.Generator().manual_seed(4))
    first = batch.host_kv_lens[0] - batch.host_query_lens[0]
    backend.plan(batch)
    return backend.attend(q[first : first + tokens], k, v, AttentionParams(scale=0.2, window=window))


@pytest.mark.parametrize("rows", [[(1, 600)], [(1, 900), (1, 3), (1, 258)], [(40, 300), (1, 1), (33, 700)]])
@pytest.mark.parametrize("window", [0, 270])
def test_every_instruction_set_equals_torch(library: Library, rows: list[tuple[int, int]], window: int) -> None:
    batch = make_batch(rows, PAGE, CPU)
    expected = attend(TorchNativeAttention(), batch, window=window)
    torch.testing.assert_close(attend(CpuAttention(library), batch, window=window), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("dtype", "window", "sizes"),
    pairwise([torch.float32, torch.bfloat16], [0, 269, 270], [(PAGE, HEAD_DIM), (16, 64)]),
)
def test_results_are_bitwise_equal_in_any_chunk_batch_and_thread_count(
    library: Library, sizes: tuple[int, int], window: int, dtype: torch.dtype
) -> None:
    """On AMX, decodes read keys in place where pages have whole tiles of 16 keys and heads are a multiple of 32."""
    backend, threads = CpuAttention(library), library.threads
    page, head_dim = sizes

    def result(*rows: tuple[int, int]) -> torch.Tensor:
        batch = make_batch([*rows], page, CPU)
        return attend(backend, batch, window=window, dtype=dtype, head_dim=head_dim)

    whole = result((700, 700))
    try:
        for count in (1, 3):
            library.set_threads(count)
            others = islice(cycle([[], [(5, 60), (1, 900)], [(1, 30)] * 40]), count, None)
            for new, kv_len in [(1, 700), (1, 256), (1, 257), (7, 640), (90, 513), (699, 700)]:
                assert torch.equal(result((new, kv_len), *next(others))[:new], whole[kv_len - new : kv_len])
    finally:
        library.set_threads(threads)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_table": torch.tensor([[99]], dtype=torch.int32)}, "a page is not in the cache"),
        ({"page_table": torch.tensor([[-1]], dtype=torch.int32)}, "a page is not in the cache"),
        ({"kv_lens": torch.tensor([9], dtype=torch.int32)}, "longer than its page table"),
        ({"kv_lens": torch.tensor([1], dtype=torch.int32)}, "more new tokens than tokens"),
        ({"query_start": torch.tensor([0, 2], dtype=torch.int32)}, "do not make up the tokens"),
        ({"slot_mapping": torch.tensor([0, 1, 8])}, "a slot is not in the cache"),
    ],
)
def test_nothing_outside_the_cache_is_read(change: dict[str, torch.Tensor], message: str, library: Library) -> None:
    tensors = {
        "query_start": torch.tensor([0, 3], dtype=torch.int32),
        "kv_lens": torch.tensor([5], dtype=torch.int32),
        "page_table": torch.tensor([[0]], dtype=torch.int32),
        "slot_mapping": torch.tensor([0, 1, 2]),
    }
    batch = AttentionBatch(**(tensors | change), page_size=PAGE, host_query_lens=[3], host_kv_lens=[5])
    backend, cache = CpuAttention(library), torch.zeros(1, PAGE, 1, 4)
    backend.plan(batch)
    with pytest.raises(ValueError, match=message):
        backend.attend(torch.zeros(3, 2, 4), cache, cache, AttentionParams(scale=1.0))


def test_shapes_that_do_not_fit_are_refused(library: Library) -> None:
    backend, cache = CpuAttention(library), torch.zeros(2, PAGE, 2, 4)
    with pytest.raises(RuntimeError, match="before plan"):
        backend.attend(torch.zeros(1, 2, 4), cache, cache, AttentionParams(scale=1.0))
    backend.plan(make_batch([(1, 3)], PAGE, CPU))
    for q, k in [
        (torch.zeros(1, 3, 4), cache),
        (torch.zeros(1, 2, 5), cache),
        (torch.zeros(2, 2, 4), cache),
        (torch.zeros(1, 2, 4), cache[:, ::2]),
        (torch.zeros(1, 2, 4), cache.transpose(1, 2)),
    ]:
        with pytest.raises(ValueError, match=r"fit|queries|contiguous"):
            backend.attend(q, k, k, AttentionParams(scale=1.0))
