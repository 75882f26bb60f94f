"""Attention by FlashInfer (https://arxiv.org/abs/2501.01005), planned once a step for all layers of one shape.

Decodes read pages. Extends attend to their own new tokens, which are contiguous, and to the pages of their prefixes;
the two results are merged by their log-sum-exps. With a sliding window, extends read pages only, because a prefix has
positions of its own. The Triton backend computes what FlashInfer has no kernels for: float32, odd head sizes, sinks.

A plan is computed on the host from the lengths of the step. Under CUDA graphs the wrappers therefore use fixed memory
(`GraphMemory`), and `plan` runs before every replay and writes there what the captured kernels read.
"""

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from shutil import which
from typing import Any, Protocol, cast

import torch

from tercet.kernels.attention.api import AttentionBackend, AttentionBatch, AttentionParams

_WORKSPACE = 256 << 20
_HEAD_DIMS = (64, 128, 256)
_TENSOR_CORES_FROM = 4
"""Query heads for each KV head from which a decode uses tensor cores."""


class Wrapper(Protocol):
    """FlashInfer wrapper: an operation that is planned and then run."""

    def plan(self, *given: Any, **options: Any) -> None: ...
    def run(self, q: torch.Tensor, *given: Any, **options: Any) -> Any: ...


class Library(Protocol):
    """The functions of module `flashinfer` that are used here."""

    def BatchDecodeWithPagedKVCacheWrapper(  # noqa: N802
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        *,
        use_tensor_cores: bool,
        use_cuda_graph: bool = False,
        **buffers: torch.Tensor,
    ) -> Wrapper: ...
    def BatchPrefillWithPagedKVCacheWrapper(self, float_workspace_buffer: torch.Tensor, kv_layout: str) -> Wrapper: ...  # noqa: N802
    def BatchPrefillWithRaggedKVCacheWrapper(self, float_workspace_buffer: torch.Tensor, kv_layout: str) -> Wrapper: ...  # noqa: N802
    def merge_state_in_place(
        self, v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor
    ) -> None: ...


@dataclass(frozen=True)
class _Shape:
    """Key of a plan; layers of equal shape share it."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scale: float
    window: int
    softcap: float

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.heads, self.kv_heads, self.head_dim

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of a plan. FlashInfer's window does not count the token itself."""
        return {
            "sm_scale": self.scale,
            "window_left": self.window - 1,
            "logits_soft_cap": self.softcap or None,
            "q_data_type": self.dtype,
            "kv_data_type": self.dtype,
        }


class GraphMemory:
    """Memory that the captured kernels of all graphs read. Graphs share it, because only one runs at a time."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []
        self._workspace: torch.Tensor | None = None

    def workspace(self, device: torch.device) -> torch.Tensor:
        """Return the workspace for partial results."""
        if self._workspace is None:
            self._workspace = _workspace(device)
        return self._workspace

    def buffers(self, table: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return index buffers for decodes with a page table [rows, pages].

        A table that is larger than all before allocates larger buffers, also for later graphs; earlier graphs keep
        theirs. The largest graph is captured first, so few reallocations happen.
        """
        rows, pages = table.shape
        if not self._buffers or len(self._buffers[2]) < rows or len(self._buffers[1]) < rows * pages:
            self._buffers = [table.new_zeros(size) for size in (rows + 1, rows * pages, rows)]
        begin, indices, tail = self._buffers
        return {
            "paged_kv_indptr_buffer": begin[: rows + 1],
            "paged_kv_indices_buffer": indices,
            "paged_kv_last_page_len_buffer": tail[:rows],
        }


class _Planned:
    """Wrapper that waits for the copy of its previous plan, because all plans use one pinned buffer."""

    def __init__(self, wrapper: Wrapper, device: torch.device) -> None:
        self.run = wrapper.run
        self._plan = wrapper.plan
        self._left = torch.Event(device=device) if device.type == "cuda" else None

    def plan(self, *given: Any, **options: Any) -> None:
        """Plan after the previous plan has left the pinned buffer."""
        if self._left is not None:
            self._left.synchronize()
        self._plan(*given, **options)
        if self._left is not None:
            self._left.record()


def missing_flashinfer() -> str:
    """Return why FlashInfer cannot be used; empty if it can."""
    return "" if find_spec("flashinfer") else "flashinfer-python is not installed: it comes with tercet-kernels[cuda]"


def missing_compiler() -> str:
    """Return why FlashInfer could not compile its kernels (it does so at first use); empty if it can."""
    if which("nvcc") or find_spec("flashinfer_jit_cache"):
        return ""
    return "there is no nvcc to compile its kernels, nor the package flashinfer-jit-cache, which has them"


class FlashInferAttention:
    """FlashInfer backend, an `AttentionBackend`. With `memory` it serves CUDA graphs with a fixed number of rows."""

    capturable = True
    bidirectional = False

    def __init__(
        self,
        library: Library | None = None,
        other: AttentionBackend | None = None,
        memory: GraphMemory | None = None,
    ) -> None:
        self._library = library or cast("Library", import_module("flashinfer"))
        self._other = other or _triton()
        self._memory = memory
        self._batch: AttentionBatch | None = None
        self._workspace: torch.Tensor | None = None
        self._planned: set[_Shape] = set()
        self._wrappers: dict[tuple[str, _Shape], _Planned] = {}

    def plan(self, batch: AttentionBatch) -> None:
        """Keep the batch. Shapes are planned at their first layer; under CUDA graphs known shapes are planned here."""
        self._batch = batch
        self._other.plan(batch)
        if self._memory is None:
            self._planned = set()
        for shape in self._planned:
            self._plan_shape(batch, shape)

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        params: AttentionParams,
        key_scale: float = 1.0,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        batch = self._batch
        if batch is None:
            raise RuntimeError("attend was called before plan")
        heads, head_dim = q.shape[1:]
        known = head_dim in _HEAD_DIMS and q.dtype in (torch.float16, torch.bfloat16) and q.dtype == k_cache.dtype
        if params.sinks is not None or not known:
            return self._other.attend(q, k_cache, v_cache, params, key_scale)
        scale = params.scale * key_scale
        shape = _Shape(heads, k_cache.shape[2], head_dim, q.dtype, scale, params.window, params.softcap)
        if shape not in self._planned:
            self._plan_shape(batch, shape)
            self._planned.add(shape)
        q, caches = q.contiguous(), (k_cache, v_cache)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        decodes = batch.decodes
        if decodes:
            self._wrappers["decode", shape].run(q[:decodes], caches, out=out[:decodes])
        if decodes < batch.rows:
            self._extend(batch, shape, q[decodes:], caches, out[decodes:])
        return out

    def _extend(
        self,
        batch: AttentionBatch,
        shape: _Shape,
        q: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        if shape.window:
            self._wrappers["pages", shape].run(q, caches, out=out)
            return
        new = batch.slot_mapping[batch.decodes :]
        k, v = (cache.flatten(0, 1)[new] for cache in caches)
        if not any(_prefixes(batch)):
            self._wrappers["new", shape].run(q, k, v, out=out)
            return
        own = self._wrappers["new", shape].run(q, k, v, out=out, return_lse=True)
        self._library.merge_state_in_place(*own, *self._wrappers["prefix", shape].run(q, caches, return_lse=True))

    def _plan_shape(self, batch: AttentionBatch, shape: _Shape) -> None:
        """Plan the wrappers that `attend` runs for layers of a shape."""
        first, size = batch.decodes, batch.page_size
        if first:
            pages = _seen_pages(batch, slice(first), shape.window)
            self._wrapper("decode", shape, batch).plan(*pages, *shape.sizes, size, **shape.options)
        if first == batch.rows:
            return
        starts = torch.tensor([0, *accumulate(batch.host_query_lens[first:])], dtype=torch.int32)
        extends = slice(first, None)
        if shape.window:
            pages = _seen_pages(batch, extends, shape.window)
            wrapper = self._wrapper("pages", shape, batch)
            wrapper.plan(starts, *pages, *shape.sizes, size, causal=True, **shape.options)
            return
        self._wrapper("new", shape, batch).plan(starts, starts, *shape.sizes, causal=True, **shape.options)
        prefixes = _prefixes(batch)
        if any(prefixes):
            lengths = (batch.kv_lens - batch.query_start.diff())[extends]
            pages = pages_of(batch.page_table[extends], lengths, prefixes, size)
            wrapper = self._wrapper("prefix", shape, batch)
            wrapper.plan(starts, *pages, *shape.sizes, size, causal=False, **shape.options)

    def _wrapper(self, kind: str, shape: _Shape, batch: AttentionBatch) -> _Planned:
        if (kind, shape) not in self._wrappers:
            self._wrappers[kind, shape] = _Planned(self._make(kind, shape, batch.page_table), batch.page_table.device)
        return self._wrappers[kind, shape]

    def _make(self, kind: str, shape: _Shape, table: torch.Tensor) -> Wrapper:
        if self._workspace is None:
            self._workspace = _workspace(table.device) if self._memory is None else self._memory.workspace(table.device)
        if kind == "new":
            return self._library.BatchPrefillWithRaggedKVCacheWrapper(self._workspace, "NHD")
        if kind != "decode":
            return self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
        tensor_cores = shape.heads // shape.kv_heads >= _TENSOR_CORES_FROM
        buffers: dict[str, Any] = (
            {} if self._memory is None else {"use_cuda_graph": True, **self._memory.buffers(table)}
        )
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_tensor_cores=tensor_cores, **buffers
        )


def _seen_pages(batch: AttentionBatch, rows: slice, window: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the pages of rows, see `pages_of`, without those before the window of each row's first new token.

    FlashInfer masks the scores of keys outside the window, but multiplies their values by 0, and other texts may hold
    these pages.
    """
    table, lengths, host_lengths, size = (
        batch.page_table[rows],
        batch.kv_lens[rows],
        batch.host_kv_lens[rows],
        batch.page_size,
    )
    if window:
        skipped = (lengths - batch.query_start.diff()[rows] - window + 1).clamp(min=0) // size
        columns = torch.arange(table.shape[1], device=table.device) + skipped[:, None]
        table = table.gather(1, columns.clamp(max=table.shape[1] - 1))
        lengths = lengths - skipped * size
        news = batch.host_query_lens[rows]
        host_lengths = [
            length - max(0, length - new - window + 1) // size * size
            for length, new in zip(host_lengths, news, strict=True)
        ]
    return pages_of(table, lengths, host_lengths, size)


def pages_of(
    table: torch.Tensor, lengths: torch.Tensor, host_lengths: list[int], page_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the page indices of rows in FlashInfer's format (CSR).

    The parts are the start of each row's pages int32 [n + 1], all pages int32, and the number of tokens in each last
    page int32 [n]. `lengths` and `host_lengths` are the rows' tokens on the device and on the host. Pages are gathered
    on the device; the other two are on the host, where plans are made. A row without tokens has no pages and 0 tokens
    in the last one.
    """
    counts = [-(-length // page_size) for length in host_lengths]
    begin = [0, *accumulate(counts)]
    device_counts = (lengths + page_size - 1) // page_size
    row = torch.arange(len(counts), device=table.device).repeat_interleave(device_counts, output_size=begin[-1])
    column = torch.arange(begin[-1], device=table.device) - (device_counts.cumsum(0) - device_counts)[row]
    tail = [length - max(count - 1, 0) * page_size for length, count in zip(host_lengths, counts, strict=True)]
    return torch.tensor(begin, dtype=torch.int32), table[row, column], torch.tensor(tail, dtype=torch.int32)


def _prefixes(batch: AttentionBatch) -> list[int]:
    """Return the number of tokens that each extend has in the cache from earlier steps."""
    lengths = zip(batch.host_kv_lens[batch.decodes :], batch.host_query_lens[batch.decodes :], strict=True)
    return [kv_len - query_len for kv_len, query_len in lengths]


def _workspace(device: torch.device) -> torch.Tensor:
    return torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)


def _triton() -> AttentionBackend:
    from tercet.kernels.attention.triton import TritonAttention

    return TritonAttention()
