"""Every backend of latent attention against its naive reference, over the same batches."""

from dataclasses import dataclass, replace

import pytest
import torch

from tercet.kernels.attention import select, torch_native
from tercet.kernels.attention.api import AttentionBackend, AttentionBatch, AttentionParams
from tercet.kernels.attention.latent import LatentSizes, latent_caches
from tercet.kernels.attention.reference import ReferenceLatent
from tercet.kernels.attention.select import attention_backend, backend_names
from tercet.kernels.attention.torch_native import TorchNativeLatent
from tercet.kernels.errors import UnavailableBackendError
from tercet.kernels.native.library import missing_library
from tercet.kernels.tools.check import make_batch
from tercet.kernels.triton import missing_triton

CPU = torch.device("cpu")
MISSING = {"cpu": missing_library(), "triton": missing_triton(CPU), "cudnn": "it needs a GPU"}
BACKENDS = [name for name in backend_names(latent=True) if not MISSING.get(name)]

SIZES = LatentSizes(rank=32, rope=16, dtype=torch.float32, cached=torch.float32)
PARAMS = AttentionParams(scale=0.3)

Rows = tuple[tuple[int, int], ...]
"""(new tokens, tokens after the step) of each."""

MIXED: Rows = ((1, 5), (1, 33), (6, 6), (7, 19), (1, 12), (1, 1))


@dataclass(frozen=True)
class Case:
    """Rows, and the sizes of the call."""

    rows: Rows = MIXED
    heads: int = 3
    rank: int = 32
    rope: int = 16
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    cached: torch.dtype | None = None  # the same, if nothing is said


CASES = {
    "decode": Case(((1, 1), (1, 9), (1, 40), (1, 8), (1, 2))),
    "one token": Case(((1, 1),)),
    "prefill": Case(((5, 5), (17, 17))),
    "chunk after prefix": Case(((3, 11), (8, 21))),
    "mixed": Case(),
    "one head": Case(heads=1),
    "nine heads": Case(heads=9),
    "sixteen heads": Case(heads=16, rank=64),
    "forty heads": Case(heads=40),
    "pages of one": Case(page_size=1),
    "pages of 64": Case(page_size=64, rope=64),
    "odd sizes": Case(rank=44, rope=22, heads=5, page_size=4),
    "long": Case(((1, 700), (1, 257), (40, 40), (30, 600)), heads=2),
    "as DeepSeek-V2-Lite": Case(((1, 70), (1, 3), (3, 40)), heads=16, rank=512, rope=64, page_size=64),
    "as DeepSeek-V2": Case(((1, 70), (2, 20)), heads=128, rank=512, rope=64),
    "as DeepSeek-V2 in bfloat16": Case(((1, 70), (2, 20)), 128, 512, 64, dtype=torch.bfloat16),
    "bfloat16": Case(dtype=torch.bfloat16),
    "float16": Case(dtype=torch.float16),
    "narrower cache": Case(dtype=torch.float32, cached=torch.bfloat16),
}


def scattered(rows: Rows, page_size: int) -> tuple[AttentionBatch, int]:
    """Rows over pages in no order, and how many pages; unused entries of the page table name no page at all."""
    batch = make_batch(list(rows), page_size, CPU)
    pages = int(batch.page_table.max()) + 1
    shuffled = torch.randperm(pages, generator=torch.Generator().manual_seed(7))
    table = shuffled[batch.page_table.long()].int()
    for row, kv_len in enumerate(batch.host_kv_lens):
        table[row, -(-kv_len // page_size) :] = 1 << 30
    slots = shuffled[batch.slot_mapping // page_size] * page_size + batch.slot_mapping % page_size
    return replace(batch, page_table=table, slot_mapping=slots), pages


def planned(name: str, batch: AttentionBatch) -> AttentionBackend:
    backend = attention_backend(name, CPU, SIZES)()
    backend.plan(batch)
    return backend


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_equals_the_reference(name: str, case: Case) -> None:
    if name == "triton" and torch.bfloat16 in (case.dtype, case.cached):
        pytest.skip("Triton's interpreter computes bfloat16 wrongly: on a GPU, tercet-kernels check has it")
    torch.manual_seed(0)
    batch, pages = scattered(case.rows, case.page_size)
    width = case.rank + case.rope
    cache = torch.randn(pages, case.page_size, width).to(case.cached or case.dtype)
    q = torch.randn(sum(batch.host_query_lens), case.heads, width).to(case.dtype)
    reference = ReferenceLatent()
    reference.plan(batch)
    given, wanted = (
        attention.attend(q, *latent_caches(cache, case.rank), AttentionParams(scale=2 * width**-0.5))
        for attention in (planned(name, batch), reference)
    )
    assert given.dtype == case.dtype
    assert given.is_contiguous()
    step = max(torch.finfo(dtype).eps for dtype in (case.dtype, cache.dtype))  # queries may be rounded as vectors are
    torch.testing.assert_close(given, wanted, rtol=2 * step, atol=max(1e-5, 2 * step))  # of sums of up to 576 products


@pytest.mark.parametrize("name", BACKENDS)
def test_queries_may_be_a_view_of_a_wider_tensor(name: str) -> None:
    torch.manual_seed(0)
    batch, pages = scattered(MIXED, 16)
    cache = torch.randn(pages, 16, 48)
    wide = torch.randn(sum(batch.host_query_lens), 7, 48)
    backend = planned(name, batch)
    part = backend.attend(wide[:, 2:5], *latent_caches(cache, 32), PARAMS)
    assert torch.equal(part, backend.attend(wide[:, 2:5].contiguous(), *latent_caches(cache, 32), PARAMS))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_long_extend_is_cut_into_blocks_without_a_seam(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_native, "_SCORES", 3 * 150 * 7)
    test_equals_the_reference(name, Case(((90, 150), (31, 31))))


@pytest.mark.parametrize("name", BACKENDS)
def test_one_plan_serves_every_layer_and_the_next_begins_anew(name: str) -> None:
    torch.manual_seed(0)
    batch, pages = scattered(MIXED, 16)
    q, caches = torch.randn(sum(batch.host_query_lens), 3, 48), torch.randn(2, pages, 16, 48)
    backend = planned(name, batch)
    first, second = (backend.attend(q, *latent_caches(cache, 32), PARAMS) for cache in caches)
    assert torch.equal(second, planned(name, batch).attend(q, *latent_caches(caches[1], 32), PARAMS))
    backend.plan(scattered(((1, 3),), 16)[0])
    backend.attend(q[:1], *latent_caches(caches[0], 32), PARAMS)
    backend.plan(batch)
    assert torch.equal(first, backend.attend(q, *latent_caches(caches[0], 32), PARAMS))


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")  # by Triton's interpreter
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("poisoned", [1, 3])
def test_nan_in_the_cache_of_a_row_reaches_no_other_row(name: str, poisoned: int) -> None:
    torch.manual_seed(0)
    batch, pages = scattered(MIXED, 16)
    cache, q = torch.randn(pages, 16, 48), torch.randn(sum(batch.host_query_lens), 3, 48)
    backend = planned(name, batch)
    healthy = backend.attend(q, *latent_caches(cache, 32), PARAMS)
    cache[batch.page_table[poisoned, : -(-MIXED[poisoned][1] // 16)]] = torch.nan
    sick = backend.attend(q, *latent_caches(cache, 32), PARAMS)
    mine = torch.zeros(len(q), dtype=torch.bool)
    mine[batch.query_start[poisoned] : batch.query_start[poisoned + 1]] = True
    assert sick[mine].isnan().all()
    assert torch.equal(sick[~mine], healthy[~mine])


@pytest.mark.parametrize("name", BACKENDS)
def test_stale_nan_past_the_end_of_a_row_is_never_seen(name: str) -> None:
    torch.manual_seed(0)
    batch, pages = scattered(MIXED, 16)
    cache = torch.full((pages * 16, 48), torch.nan)
    for row, kv_len in enumerate(batch.host_kv_lens):
        position = torch.arange(kv_len)
        cache[batch.page_table[row, position // 16].long() * 16 + position % 16] = torch.randn(kv_len, 48)
    q = torch.randn(sum(batch.host_query_lens), 3, 48)
    assert planned(name, batch).attend(q, *latent_caches(cache.view(pages, 16, 48), 32), PARAMS).isfinite().all()


@pytest.mark.parametrize("name", [*BACKENDS, "reference"])
def test_attend_before_plan_is_refused(name: str) -> None:
    backend = ReferenceLatent() if name == "reference" else attention_backend(name, CPU, SIZES)()
    with pytest.raises(RuntimeError, match="before plan"):
        backend.attend(torch.zeros(1, 1, 48), *latent_caches(torch.zeros(1, 16, 48), 32), AttentionParams(scale=1.0))


@pytest.mark.parametrize("name", ["flashinfer", "cpu2"])
def test_backends_without_latent_attention_are_refused(name: str) -> None:
    with pytest.raises(UnavailableBackendError, match=f"no backend '{name}' of latent attention: there are auto, "):
        attention_backend(name, CPU, SIZES)


def test_native_kernels_need_a_cpu() -> None:
    with pytest.raises(UnavailableBackendError, match="'cpu' of latent attention: it does not run on cuda"):
        attention_backend("cpu", torch.device("cuda"), SIZES)


def test_triton_names_a_device_where_it_cannot_run() -> None:
    refused = "'triton' of latent attention: (Triton's kernels do not run on meta|triton is not installed)"
    with pytest.raises(UnavailableBackendError, match=refused):
        attention_backend("triton", torch.device("meta"), SIZES)


def test_auto_takes_an_available_backend() -> None:
    expected = attention_backend("torch_native" if missing_library() else "cpu", CPU, SIZES)
    assert attention_backend("auto", CPU, SIZES) is expected


@pytest.mark.parametrize(
    ("memory", "dtype", "cached", "rank", "fits"),
    [
        (99, torch.bfloat16, torch.bfloat16, 512, True),
        (99, torch.float32, torch.float32, 512, False),
        (99, torch.float32, torch.bfloat16, 512, True),
        (99, torch.float32, torch.float32, 256, True),
        (163, torch.float32, torch.float32, 512, True),
    ],
)
def test_auto_takes_triton_only_where_a_gpu_has_the_memory(
    memory: int, dtype: torch.dtype, cached: torch.dtype, rank: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In KiB, as the kernels were compiled: 108 for DeepSeek's vectors in float32."""
    triton_latent = pytest.importorskip("tercet.kernels.attention.triton_latent", reason="these are Triton's kernels")
    monkeypatch.setattr(select, "missing_triton", lambda _: "")
    monkeypatch.setattr(triton_latent, "shared_memory", lambda _: memory << 10)
    gpu, sizes = torch.device("cuda"), LatentSizes(rank=rank, rope=64, dtype=dtype, cached=cached)
    found = attention_backend("auto", gpu, sizes)
    assert found is (triton_latent.TritonLatent if fits else TorchNativeLatent)
    if not fits:
        with pytest.raises(UnavailableBackendError, match="bytes of shared memory for vectors in float32, of 101376"):
            attention_backend("triton", gpu, sizes)
