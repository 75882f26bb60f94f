"""Attention by FlashInfer's wrappers (https://arxiv.org/abs/2501.01005), planned once a step for all layers alike.

What it has no kernels for (float32, odd head sizes, sinks) goes to ours in Triton. Its plan is made on the host from
the lengths of the step, so its decodes are not recorded in graphs here.
"""

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from typing import Any, Protocol, cast

import torch

from tercet.kernels.attention.api import AttentionBackend, AttentionBatch

_WORKSPACE = 128 << 20
_HEAD_DIMS = (64, 128, 256)
_TENSOR_CORES_FROM = 4
"""Query heads for each KV head from which a decode is a matrix product worth tensor cores."""


class Wrapper(Protocol):
    """One of FlashInfer's planned operations."""

    def plan(self, *given: Any, **options: Any) -> None: ...  # noqa: D102
    def run(self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor: ...  # noqa: D102


class Library(Protocol):
    """What is used of the module `flashinfer`."""

    def BatchDecodeWithPagedKVCacheWrapper(  # noqa: D102, N802
        self, workspace: torch.Tensor, kv_layout: str, *, use_tensor_cores: bool
    ) -> Wrapper: ...
    def BatchPrefillWithPagedKVCacheWrapper(  # noqa: D102, N802
        self, workspace: torch.Tensor, kv_layout: str
    ) -> Wrapper: ...


@dataclass(frozen=True)
class _Shape:
    """What a plan is good for: layers that are alike share it."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scale: float
    window: int
    softcap: float


def missing_flashinfer() -> str:
    """Why FlashInfer cannot be used; empty if it can."""
    return "" if find_spec("flashinfer") else "flashinfer-python is not installed: it comes with tercet-kernels[cuda]"


class FlashInferAttention:
    """The FlashInfer backend. See `AttentionBackend`."""

    capturable = False

    def __init__(self, library: Library | None = None, other: AttentionBackend | None = None) -> None:
        self._library = library or cast("Library", import_module("flashinfer"))
        self._other = other or _triton()
        self._batch: AttentionBatch | None = None
        self._workspace: torch.Tensor | None = None
        self._plans: dict[_Shape, tuple[Wrapper | None, Wrapper | None]] = {}
        self._wrappers: dict[tuple[str, _Shape], Wrapper] = {}

    def plan(self, batch: AttentionBatch) -> None:
        """Keep the batch: the library plans at the first layer of each shape."""
        self._batch = batch
        self._plans = {}
        self._other.plan(batch)

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        batch = self._batch
        if batch is None:
            raise RuntimeError("attend was called before plan")
        heads, head_dim = q.shape[1:]
        known = head_dim in _HEAD_DIMS and q.dtype in (torch.float16, torch.bfloat16) and q.dtype == k_cache.dtype
        if sinks is not None or not known:
            return self._other.attend(q, k_cache, v_cache, scale=scale, window=window, softcap=softcap, sinks=sinks)
        shape = _Shape(heads, k_cache.shape[2], head_dim, q.dtype, scale, window, softcap)
        if shape not in self._plans:
            self._plans[shape] = self._decodes(batch, shape), self._extends(batch, shape)
        decode, extend = self._plans[shape]
        q, out = q.contiguous(), torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if decode is not None:
            out[: batch.decodes] = decode.run(q[: batch.decodes], (k_cache, v_cache))
        if extend is not None:
            out[batch.decodes :] = extend.run(q[batch.decodes :], (k_cache, v_cache))
        return out

    def _decodes(self, batch: AttentionBatch, shape: _Shape) -> Wrapper | None:
        if not batch.decodes:
            return None
        key = "decode", shape
        if key not in self._wrappers:
            tensor_cores = shape.heads // shape.kv_heads >= _TENSOR_CORES_FROM
            self._wrappers[key] = self._library.BatchDecodeWithPagedKVCacheWrapper(
                self._memory(batch), "NHD", use_tensor_cores=tensor_cores
            )
        wrapper = self._wrappers[key]
        wrapper.plan(*pages_of(batch, 0, batch.decodes), *_sizes(batch, shape), **_options(shape))
        return wrapper

    def _extends(self, batch: AttentionBatch, shape: _Shape) -> Wrapper | None:
        if batch.decodes == batch.rows:
            return None
        key = "extend", shape
        if key not in self._wrappers:
            self._wrappers[key] = self._library.BatchPrefillWithPagedKVCacheWrapper(self._memory(batch), "NHD")
        wrapper = self._wrappers[key]
        starts = torch.tensor([0, *accumulate(batch.host_query_lens[batch.decodes :])], dtype=torch.int32)
        pages = pages_of(batch, batch.decodes, batch.rows)
        wrapper.plan(starts, *pages, *_sizes(batch, shape), causal=True, **_options(shape))
        return wrapper

    def _memory(self, batch: AttentionBatch) -> torch.Tensor:
        if self._workspace is None:
            self._workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=batch.page_table.device)
        return self._workspace


def pages_of(batch: AttentionBatch, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(where each row's pages begin int32 [n + 1], the pages of all int32, tokens in each last page int32 [n]).

    Of rows [first, last). The pages are on the batch's device, the other two on the host, where they are planned from.
    """
    lengths = batch.host_kv_lens[first:last]
    counts = [-(-length // batch.page_size) for length in lengths]
    begin = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
    row = torch.arange(last - first).repeat_interleave(torch.tensor(counts))
    column = torch.arange(len(row)) - begin[row]
    device = batch.page_table.device
    pages = batch.page_table[(row + first).to(device, non_blocking=True), column.to(device, non_blocking=True)]
    tail = [length - (count - 1) * batch.page_size for length, count in zip(lengths, counts, strict=True)]
    return begin, pages, torch.tensor(tail, dtype=torch.int32)


def _sizes(batch: AttentionBatch, shape: _Shape) -> tuple[int, int, int, int]:
    return shape.heads, shape.kv_heads, shape.head_dim, batch.page_size


def _options(shape: _Shape) -> dict[str, Any]:
    """FlashInfer counts the tokens of a window without the token itself."""
    return {
        "sm_scale": shape.scale,
        "window_left": shape.window - 1,
        "logits_soft_cap": shape.softcap or None,
        "q_data_type": shape.dtype,
        "kv_data_type": shape.dtype,
    }


def _triton() -> AttentionBackend:
    from tercet.kernels.attention.triton import TritonAttention

    return TritonAttention()
