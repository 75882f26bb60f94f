"""What FlashInfer is told, against a library that computes what its documentation says of it."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tercet.kernels.attention.api import AttentionBatch
from tercet.kernels.attention.flashinfer import FlashInferAttention, pages_of
from tercet.kernels.attention.reference import ReferenceAttention
from tercet.kernels.attention.select import is_verified
from tercet.kernels.check import make_batch

CPU = torch.device("cpu")
ROWS = [(1, 9), (1, 4), (1, 17), (5, 5), (6, 22)]


class Wrapper:
    """Attention from the arguments of `plan`, one page list at a time."""

    def __init__(self, *, extends: bool) -> None:
        self.extends = extends
        self.plans = 0

    def plan(self, *given: Any, causal: bool = False, **options: Any) -> None:
        self.plans += 1
        assert causal == self.extends
        starts, given = (given[0], given[1:]) if self.extends else (torch.arange(len(given[0])), given)
        begin, pages, tail, self.heads, self.kv_heads, self.head_dim, size = given
        queries = starts.diff().tolist()
        counts = begin.diff()
        lengths = ((counts - 1) * size + tail).tolist()
        table = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32)
        for row, count in enumerate(counts.tolist()):
            table[row, :count] = pages[begin[row] : begin[row] + count]
        self.options = options
        self.reference = ReferenceAttention()
        self.reference.plan(
            AttentionBatch(
                query_start=starts.int(),
                kv_lens=torch.tensor(lengths).int(),
                page_table=table,
                slot_mapping=torch.empty(0),
                page_size=size,
                host_query_lens=queries,
                host_kv_lens=lengths,
            )
        )

    def run(self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        assert q.shape[1:] == (self.heads, self.head_dim)
        assert {q.dtype, cache[0].dtype} == {self.options["q_data_type"]}
        window, softcap = self.options["window_left"] + 1, self.options["logits_soft_cap"] or 0.0
        return self.reference.attend(q, *cache, scale=self.options["sm_scale"], window=window, softcap=softcap)


@dataclass
class Library:
    made: list[Wrapper] = field(default_factory=list)
    tensor_cores: list[bool] = field(default_factory=list)

    def BatchDecodeWithPagedKVCacheWrapper(self, workspace: Any, layout: str, *, use_tensor_cores: bool) -> Wrapper:  # noqa: N802
        self.tensor_cores.append(use_tensor_cores)
        return self._make(layout, extends=False)

    def BatchPrefillWithPagedKVCacheWrapper(self, workspace: Any, layout: str) -> Wrapper:  # noqa: N802
        return self._make(layout, extends=True)

    def _make(self, layout: str, *, extends: bool) -> Wrapper:
        assert layout == "NHD"
        self.made.append(Wrapper(extends=extends))
        return self.made[-1]


def attend(
    library: Library, rows: list[tuple[int, int]], *, dtype: torch.dtype = torch.float16, **options: Any
) -> None:
    """Two layers of one step: both must be what the reference says."""
    batch = make_batch(rows, 4, CPU)
    pages = int(batch.page_table.max()) + 1
    k, v = torch.randn(2, pages, 4, 2, 64).to(dtype).unbind()
    q = torch.randn(sum(batch.host_query_lens), 8, 64).to(dtype)
    backend, reference = FlashInferAttention(library, ReferenceAttention()), ReferenceAttention()
    backend.plan(batch)
    reference.plan(batch)
    for _ in range(2):
        actual = backend.attend(q, k, v, scale=0.2, **options)
        assert torch.equal(actual, reference.attend(q, k, v, scale=0.2, **options))


@pytest.mark.parametrize("rows", [ROWS, ROWS[:3], ROWS[3:]])
@pytest.mark.parametrize("options", [{}, {"window": 5}, {"softcap": 3.0}])
def test_rows_of_both_kinds(rows: list[tuple[int, int]], options: dict[str, Any]) -> None:
    library = Library()
    attend(library, rows, **options)
    assert {wrapper.extends for wrapper in library.made} == {length > 1 for length, _ in rows}
    assert all(wrapper.plans == 1 for wrapper in library.made)  # one plan for both layers
    assert all(library.tensor_cores)


@pytest.mark.parametrize("options", [{"dtype": torch.float32}, {"sinks": torch.zeros(8)}])
def test_what_it_does_not_know_goes_elsewhere(options: dict[str, Any]) -> None:
    library = Library()
    attend(library, ROWS, **options)
    assert library.made == []


def test_pages_of_some_rows() -> None:
    begin, pages, tail = pages_of(make_batch(ROWS, 4, CPU), 1, 4)
    assert begin.tolist() == [0, 1, 6, 8]
    assert pages.tolist() == [3, 4, 5, 6, 7, 8, 9, 10]
    assert tail.tolist() == [4, 1, 1]


def test_nothing_is_verified_that_was_never_measured() -> None:
    assert not is_verified("flashinfer", (9, 0))
    assert not is_verified("triton", (8, 0))
