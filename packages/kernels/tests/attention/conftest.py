"""A module `flashinfer` that computes with torch: the signatures, shapes and refusals of the real one (0.6 and 0.7).

A plan's host arrays are kept at once; pages and lengths are read when it runs, in graph mode from the caller's buffers,
as recorded kernels read them. Log-sum-exps are in base 2, and of a row without keys -inf with an output of zero.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

Cache = tuple[torch.Tensor, torch.Tensor]


def softmax(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output [queries, heads, dim] float32, log2 of the sum of exponentials [queries, heads])."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->qhk", q.float(), k) * scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse.isinf(), 0.0)[..., None]).exp()
    return torch.einsum("qhk,khd->qhd", weights, v), lse / torch.log(torch.tensor(2.0))


def visible(queries: int, keys: int, causal: bool, window_left: int) -> torch.Tensor:
    """bool [queries, keys]: the queries are the last of the keys."""
    position = torch.arange(keys - queries, keys)[:, None]
    key = torch.arange(keys)[None]
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        seen &= key <= position
    if window_left >= 0:
        seen &= key >= position - window_left
    return seen


class _Wrapper:
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str) -> None:
        assert kv_layout == "NHD"
        assert float_workspace_buffer.dtype == torch.uint8
        self.plans = 0
        self.workspace = float_workspace_buffer

    def _keep(self, heads: int, kv_heads: int, head_dim: int, causal: bool, options: dict[str, Any]) -> None:
        self.plans += 1
        self.heads, self.kv_heads, self.head_dim, self.causal, self.options = heads, kv_heads, head_dim, causal, options

    def _run(self, q: torch.Tensor, rows: list[Cache], queries: list[int], out: Any, return_lse: bool) -> Any:
        assert q.shape[1:] == (self.heads, self.head_dim)
        assert q.dtype == self.options["q_data_type"]
        assert len(q) == sum(queries)
        parts = []
        for part, (k, v) in zip(torch.split(q, queries), rows, strict=True):
            assert k.dtype == self.options["kv_data_type"]
            assert k.shape[1:] == (self.kv_heads, self.head_dim)
            seen = visible(len(part), len(k), self.causal, self.options["window_left"])
            scale, softcap = self.options["sm_scale"], self.options["logits_soft_cap"] or 0.0
            parts.append(softmax(part, k, v, seen, scale, softcap))
        values, lse = (torch.cat(column) for column in zip(*parts, strict=True))
        out = torch.empty_like(q) if out is None else out
        assert (out.shape, out.dtype) == (q.shape, q.dtype)
        out.copy_(values)
        return (out, lse) if return_lse else out


def gathered(cache: Cache, begin: torch.Tensor, pages: torch.Tensor, tail: torch.Tensor, size: int) -> list[Cache]:
    """The keys and values of each row, by its pages."""
    assert cache[0].shape[1] == size
    rows = []
    for row, (first, last) in enumerate(zip(begin[:-1].tolist(), begin[1:].tolist(), strict=True)):
        length = (last - first - 1) * size + int(tail[row]) if last > first else 0
        k, v = (part[pages[first:last].long()].flatten(0, 1)[:length] for part in cache)
        rows.append((k, v))
    return rows


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        assert (backend, jit_args) == ("auto", None)
        self.use_cuda_graph, self.use_tensor_cores = use_cuda_graph, use_tensor_cores
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None
            assert paged_kv_indices_buffer is not None
            assert paged_kv_last_page_len_buffer is not None
            assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
            self.buffers = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
    ) -> None:
        given: dict[str, Any] = {"window_left": window_left, "logits_soft_cap": logits_soft_cap, "sm_scale": sm_scale}
        given |= {"q_data_type": q_data_type, "kv_data_type": kv_data_type}
        self._keep(num_qo_heads, num_kv_heads, head_dim, False, given)
        self.page_size = page_size
        planned = indptr, indices, last_page_len
        assert all(tensor.dtype == torch.int32 for tensor in planned)
        assert len(indices) == indptr[-1]
        if not self.use_cuda_graph:
            self.buffers = planned
            return
        if len(last_page_len) != len(self.buffers[2]):
            raise ValueError("The batch size should be fixed in cudagraph mode")
        if len(indices) > len(self.buffers[1]):
            raise ValueError("The size of indices should be less than or equal to the allocated buffer")
        for buffer, tensor in zip(self.buffers, planned, strict=True):
            buffer[: len(tensor)].copy_(tensor)

    def run(
        self, q: torch.Tensor, paged_kv_cache: Cache, *, out: torch.Tensor | None = None, return_lse: bool = False
    ) -> Any:
        rows = gathered(paged_kv_cache, *self.buffers, self.page_size)
        return self._run(q, rows, [1] * len(rows), out, return_lse)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        given: dict[str, Any] = {"window_left": window_left, "logits_soft_cap": logits_soft_cap, "sm_scale": sm_scale}
        given |= {"q_data_type": q_data_type, "kv_data_type": kv_data_type}
        self._keep(num_qo_heads, num_kv_heads, head_dim_qk, causal, given)
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        self.queries, self.page_size = qo_indptr.diff().tolist(), page_size
        self.pages = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        assert all(tensor.dtype == torch.int32 for tensor in (qo_indptr, *self.pages))

    def run(
        self, q: torch.Tensor, paged_kv_cache: Cache, *, out: torch.Tensor | None = None, return_lse: bool = False
    ) -> Any:
        return self._run(q, gathered(paged_kv_cache, *self.pages, self.page_size), self.queries, out, return_lse)


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        *,
        causal: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        given: dict[str, Any] = {"window_left": window_left, "logits_soft_cap": logits_soft_cap, "sm_scale": sm_scale}
        given |= {"q_data_type": q_data_type, "kv_data_type": kv_data_type}
        self._keep(num_qo_heads, num_kv_heads, head_dim_qk, causal, given)
        self.queries, self.keys = qo_indptr.diff().tolist(), kv_indptr.diff().tolist()

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        rows = list(zip(torch.split(k, self.keys), torch.split(v, self.keys), strict=True))
        return self._run(q, rows, self.queries, out, return_lse)


def merge_state_in_place(v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor) -> None:
    assert v.is_contiguous()
    highest = torch.maximum(s, s_other)
    mine, theirs = (s - highest).exp2()[..., None], (s_other - highest).exp2()[..., None]
    v.copy_((v.float() * mine + v_other.float() * theirs) / (mine + theirs))
    s.copy_(highest + (mine + theirs)[..., 0].log2())


@dataclass
class FakeFlashInfer:
    """The module, with a book of what was made."""

    made: list[_Wrapper] = field(default_factory=list)
    merge_state_in_place = staticmethod(merge_state_in_place)

    def BatchDecodeWithPagedKVCacheWrapper(self, *given: Any, **options: Any) -> Any:  # noqa: N802
        return self._made(BatchDecodeWithPagedKVCacheWrapper(*given, **options))

    def BatchPrefillWithPagedKVCacheWrapper(self, *given: Any, **options: Any) -> Any:  # noqa: N802
        return self._made(BatchPrefillWithPagedKVCacheWrapper(*given, **options))

    def BatchPrefillWithRaggedKVCacheWrapper(self, *given: Any, **options: Any) -> Any:  # noqa: N802
        return self._made(BatchPrefillWithRaggedKVCacheWrapper(*given, **options))

    def _made(self, wrapper: _Wrapper) -> _Wrapper:
        self.made.append(wrapper)
        return wrapper


@pytest.fixture
def library() -> FakeFlashInfer:
    torch.manual_seed(0)
    return FakeFlashInfer()
