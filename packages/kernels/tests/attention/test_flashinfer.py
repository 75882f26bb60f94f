"""What FlashInfer is told, against a library of its signatures that computes what its documentation says of it."""

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from packages.kernels.tests.attention.freed_pages import poison_freed_pages
from tercet.kernels.attention import flashinfer, select
from tercet.kernels.attention.api import AttentionBatch, AttentionParams
from tercet.kernels.attention.flashinfer import FlashInferAttention, GraphMemory, pages_of
from tercet.kernels.attention.reference import ReferenceAttention
from tercet.kernels.attention.select import graph_backend, is_verified, select_backend
from tercet.kernels.attention.torch_native import TorchNativeAttention
from tercet.kernels.tools.check import make_batch

CPU = torch.device("cpu")
DECODES = [(1, 9), (1, 4), (1, 17)]
FRESH = [(5, 5), (9, 9)]
CONTINUED = [(6, 22), (3, 3), (4, 8)]
"""A prefix that ends within a page, none at all, and one that ends with its page."""


def kinds(library: Any) -> list[str]:
    return [type(wrapper).__name__.removeprefix("Batch").split("KV")[0] for wrapper in library.made]


def compare(
    backend: FlashInferAttention,
    batch: AttentionBatch,
    *,
    heads: int = 8,
    dtype: torch.dtype = torch.float16,
    **options: Any,
) -> None:
    """Two layers of a planned step: both must be what the reference says."""
    size = batch.page_size
    pages = int(batch.page_table.max()) + 1
    k, v = torch.randn(2, pages, size, 2, 64).to(dtype).unbind()
    poison_freed_pages(batch, options.get("window", 0), k, v)
    reference = ReferenceAttention()
    reference.plan(batch)
    params = AttentionParams(scale=0.2, **options)
    for _ in range(2):
        q = torch.randn(sum(batch.host_query_lens), heads, 64).to(dtype)
        actual = backend.attend(q, k, v, params)
        torch.testing.assert_close(actual, reference.attend(q, k, v, params), rtol=2e-3, atol=2e-3)


def attend(library: Any, rows: list[tuple[int, int]], page_size: int = 4, **options: Any) -> None:
    batch = make_batch(rows, page_size, CPU)
    backend = FlashInferAttention(library, ReferenceAttention())
    backend.plan(batch)
    compare(backend, batch, **options)


@pytest.mark.parametrize("rows", [DECODES, FRESH, CONTINUED, DECODES + FRESH, DECODES + CONTINUED])
@pytest.mark.parametrize("options", [{}, {"window": 5}, {"softcap": 3.0}])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_every_kind_of_row(library: Any, rows: list[tuple[int, int]], options: dict[str, Any], page_size: int) -> None:
    attend(library, rows, page_size, **options)
    expected = ["DecodeWithPaged"] * (rows[0] in DECODES)
    if rows[-1] not in DECODES:
        prefix = rows[-1] in CONTINUED
        new = ["PrefillWithRagged"] + ["PrefillWithPaged"] * prefix
        expected += ["PrefillWithPaged"] if options.get("window") else new
    assert kinds(library) == expected
    assert all(wrapper.plans == 1 for wrapper in library.made)  # one plan for both layers
    assert len({wrapper.workspace.data_ptr() for wrapper in library.made}) == 1


@pytest.mark.parametrize(("heads", "tensor_cores"), [(2, False), (6, False), (8, True), (16, True)])
def test_tensor_cores_by_query_heads_of_a_kv_head(library: Any, heads: int, tensor_cores: bool) -> None:
    attend(library, DECODES, heads=heads)
    assert [wrapper.use_tensor_cores for wrapper in library.made] == [tensor_cores]


@pytest.mark.parametrize("options", [{"dtype": torch.float32}, {"sinks": torch.zeros(8)}])
def test_unsupported_inputs_go_to_the_other_backend(library: Any, options: dict[str, Any]) -> None:
    attend(library, DECODES + FRESH, **options)
    assert library.made == []


def test_wrappers_are_made_once_and_planned_every_step(library: Any) -> None:
    backend = FlashInferAttention(library, ReferenceAttention())
    for rows in (DECODES + CONTINUED, [(1, 3)], [(1, 10), (2, 6)]):
        batch = make_batch(rows, 4, CPU)
        backend.plan(batch)
        compare(backend, batch)
    assert [wrapper.plans for wrapper in library.made] == [3, 2, 2]


def graph(rows: int, pages: int) -> AttentionBatch:
    """Fixed memory of decodes, as a graph is recorded over: every row has one token, in a spare page."""
    return AttentionBatch(
        query_start=torch.arange(rows + 1, dtype=torch.int32),
        kv_lens=torch.ones(rows, dtype=torch.int32),
        page_table=torch.full((rows, pages), 99, dtype=torch.int32),
        slot_mapping=torch.zeros(rows, dtype=torch.int64),
        page_size=4,
        host_query_lens=[1] * rows,
        host_kv_lens=[1] * rows,
    )


def test_a_graph_reads_the_step_it_replays(library: Any) -> None:
    """Recording runs a wrapper that was planned for nothing; a plan before each replay changes what it reads."""
    memory = GraphMemory()
    for rows in (4, 2):  # the largest first
        fixed = graph(rows, 6)
        backend = FlashInferAttention(library, TorchNativeAttention(), memory)
        backend.plan(fixed)
        q = torch.randn(rows, 8, 64).half()
        k, v = torch.randn(2, 100, 4, 2, 64).half().unbind()
        params = AttentionParams(scale=0.2)
        recorded = backend.attend(q, k, v, params)
        run = library.made[-1].run
        for lengths in ([9, 4, 17, 24][:rows], [1, 24, 2, 3][:rows]):
            batch = make_batch([(1, length) for length in lengths], 4, CPU)
            fixed.page_table[:, : batch.page_table.shape[1]] = batch.page_table
            fixed.kv_lens.copy_(batch.kv_lens)
            backend.plan(replace(fixed, host_kv_lens=lengths))
            run(q, (k, v), out=recorded)  # what the graph does
            reference = ReferenceAttention()
            reference.plan(batch)
            torch.testing.assert_close(recorded, reference.attend(q, k, v, params), rtol=2e-3, atol=2e-3)
    assert [wrapper.plans for wrapper in library.made] == [3, 3]
    assert all(wrapper.use_cuda_graph for wrapper in library.made)
    assert len({wrapper.buffers[1].data_ptr() for wrapper in library.made}) == 1
    assert len({wrapper.workspace.data_ptr() for wrapper in library.made}) == 1


def test_a_graph_larger_than_those_before_has_memory_that_later_ones_share(library: Any) -> None:
    """As of steps in which few choices have many rows each. What was recorded before reads what it did."""
    memory = GraphMemory()
    first, larger, last = (memory.buffers(graph(rows, 6).page_table) for rows in (2, 3, 2))
    indices = "paged_kv_indices_buffer"
    assert [len(given[indices]) for given in (first, larger, last)] == [12, 18, 18]
    assert larger[indices].data_ptr() == last[indices].data_ptr() != first[indices].data_ptr()
    assert len(larger["paged_kv_last_page_len_buffer"]) == 3


def test_a_graph_of_each_cache_group_has_its_own_memory(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="what FlashInfer does not know goes to Triton")
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    groups = [graph_backend(FlashInferAttention) for _ in range(2)]
    for make in groups:
        assert make is not None
        for rows in (3, 2):
            backend = make()
            backend.plan(graph(rows, 6))
            cache = torch.zeros(100, 4, 1, 64).half()
            backend.attend(torch.zeros(rows, 4, 64).half(), cache, cache, AttentionParams(scale=1.0))
    assert len({wrapper.buffers[1].data_ptr() for wrapper in library.made}) == 2
    assert graph_backend(TorchNativeAttention) is None


def test_pages_of_rows_with_and_without_tokens() -> None:
    table = torch.tensor([[3, 4, 99], [5, 99, 99], [6, 7, 8]], dtype=torch.int32)
    begin, pages, tail = pages_of(table, torch.tensor([5, 0, 12], dtype=torch.int32), [5, 0, 12], 4)
    assert begin.tolist() == [0, 2, 2, 5]
    assert pages.tolist() == [3, 4, 6, 7, 8]
    assert tail.tolist() == [1, 0, 4]
    assert {begin.dtype, pages.dtype, tail.dtype} == {torch.int32}


def test_only_recorded_results_count_as_verified() -> None:
    assert is_verified("flashinfer", (9, 0))
    assert not is_verified("flashinfer", (8, 0))
    assert not is_verified("triton", (8, 0))


@pytest.mark.parametrize(("nvcc", "prebuilt"), [(True, False), (False, True), (False, False)])
def test_kernels_come_from_nvcc_or_a_package(nvcc: bool, prebuilt: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "which", lambda _: "/usr/bin/nvcc" if nvcc else None)
    monkeypatch.setattr(flashinfer, "find_spec", lambda _: object() if prebuilt else None)
    assert (flashinfer.missing_compiler() == "") == (nvcc or prebuilt)


@pytest.mark.parametrize("ready", [True, False])
def test_auto_takes_flashinfer_if_it_is_verified_and_compiled(ready: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "missing_flashinfer", lambda: "")
    monkeypatch.setattr(select, "missing_compiler", lambda: "" if ready else "no nvcc")
    monkeypatch.setattr(select, "missing_triton", lambda _: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert select_backend("auto", torch.device("cuda")).name == ("flashinfer" if ready else "triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert select_backend("auto", torch.device("cuda")).name == "triton"
