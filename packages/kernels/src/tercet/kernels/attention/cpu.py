"""Attention by the native library (algorithm: csrc/attention.cpp), over caches in float32 or bfloat16."""

import ctypes

import torch

from tercet.kernels.attention.api import AttentionBatch, AttentionParams
from tercet.kernels.attention.latent import latent_rank
from tercet.kernels.attention.torch_native import TorchNativeAttention, TorchNativeLatent
from tercet.kernels.native import abi
from tercet.kernels.native.library import Library, load_library


class CpuAttention:
    """Native CPU backend, an `AttentionBackend`.

    Caches of other dtypes, or with values of another size than keys, go to plain torch.
    """

    capturable = False
    bidirectional = True

    def __init__(self, library: Library | None = None) -> None:
        """Raise UnavailableBackendError if the library was not built."""
        self._attend = (library or load_library()).functions.attend
        self._batch: AttentionBatch | None = None
        self._rows = abi.Rows()
        self._torch = TorchNativeAttention()

    def plan(self, batch: AttentionBatch) -> None:
        """See `AttentionBackend.plan`."""
        self._batch = batch
        self._rows = rows_of(batch)

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        params: AttentionParams,
        key_scale: float = 1.0,
    ) -> torch.Tensor:
        """Compute `AttentionBackend.attend`. Raises ValueError for pages that are not in the cache."""
        if self._batch is None:
            raise RuntimeError("attend was called before plan")
        if k_cache.dtype not in (torch.float32, torch.bfloat16) or v_cache.shape != k_cache.shape:
            self._torch.plan(self._batch)
            return self._torch.attend(q, k_cache, v_cache, params, key_scale)
        tokens, heads, _ = q.shape
        query, out = q.float().contiguous(), torch.empty(q.shape)
        if tokens != self._rows.tokens:
            raise ValueError(f"{tokens} queries for a batch of {self._rows.tokens} tokens")
        sinks = None if params.sinks is None else params.sinks.float().contiguous()
        cache = cache_of(k_cache, v_cache, self._batch.page_size)
        if heads % cache.kv_heads or q.shape[2] != cache.head_dim or (sinks is not None and sinks.shape != (heads,)):
            raise ValueError(f"queries {list(q.shape)} do not fit keys {list(k_cache.shape)}")
        pointer = None if sinks is None else sinks.data_ptr()
        scoring = abi.Scoring(params.scale * key_scale, params.softcap, params.window, pointer)
        structs = ctypes.byref(cache), ctypes.byref(self._rows), ctypes.byref(scoring)
        self._attend(query.data_ptr(), *structs, heads, out.data_ptr())
        return out.to(q.dtype)


class CpuLatent(CpuAttention):
    """Native CPU backend of latent attention."""

    def __init__(self, library: Library | None = None) -> None:
        """Raise UnavailableBackendError if the library was not built."""
        super().__init__(library)
        self._torch = TorchNativeLatent()

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        params: AttentionParams,
        key_scale: float = 1.0,
    ) -> torch.Tensor:
        """Compute `AttentionBackend.attend`. Raises ValueError for pages that are not in the cache."""
        if self._batch is None:
            raise RuntimeError("attend was called before plan")
        rank = latent_rank(v_cache, params)
        if k_cache.dtype not in (torch.float32, torch.bfloat16):
            self._torch.plan(self._batch)
            return self._torch.attend(q, k_cache, v_cache, params, key_scale)
        tokens, heads, width = q.shape
        query, out = q.float().contiguous(), torch.empty(tokens, heads, rank)
        if tokens != self._rows.tokens:
            raise ValueError(f"{tokens} queries for a batch of {self._rows.tokens} tokens")
        vectors = cache_of(k_cache, k_cache, self._batch.page_size)
        if width != vectors.head_dim or not 0 < rank <= width:
            raise ValueError(f"queries {list(q.shape)} of rank {rank} do not fit a cache {list(k_cache.shape)}")
        vectors.value_dim = rank
        scoring = abi.Scoring(params.scale * key_scale, 0.0, 0, None)
        structs = ctypes.byref(vectors), ctypes.byref(self._rows), ctypes.byref(scoring)
        self._attend(query.data_ptr(), *structs, heads, out.data_ptr())
        return out.to(q.dtype)


def rows_of(batch: AttentionBatch) -> abi.Rows:
    """Return a batch as the library's struct, which points into the batch's tensors without owning them."""
    expected = (torch.int32, torch.int32, torch.int32, torch.int64)
    tensors = (batch.query_start, batch.kv_lens, batch.page_table, batch.slot_mapping)
    for tensor, dtype in zip(tensors, expected, strict=True):
        if tensor.dtype != dtype or not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise ValueError("a batch for native attention has contiguous int32 and int64 tensors on the CPU")
    rows, width = batch.page_table.shape
    if batch.query_start.shape != (rows + 1,) or batch.kv_lens.shape != (rows,):
        raise ValueError("a batch's tensors differ in rows")
    seen = batch.seen
    if seen is not None and (seen.dtype != torch.int32 or seen.shape != batch.slot_mapping.shape):
        raise ValueError("a batch's `seen` is int32, one for each token")
    starts, lengths, pages, slots = (tensor.data_ptr() for tensor in tensors)
    return abi.Rows(
        rows, len(batch.slot_mapping), starts, lengths, pages, width, slots, None if seen is None else seen.data_ptr()
    )


def cache_of(k: torch.Tensor, v: torch.Tensor, page_size: int) -> abi.Cache:
    """Return a layer's cache as the library's struct."""
    pages, size, kv_heads, head_dim = k.shape
    if v.shape != k.shape or v.dtype != k.dtype or size != page_size:
        raise ValueError(f"caches {list(k.shape)} and {list(v.shape)} do not fit pages of {page_size} tokens")
    if not (k.is_contiguous() and v.is_contiguous()) or k.device.type != "cpu":
        raise ValueError("native attention needs contiguous caches on the CPU")
    return abi.Cache(k.data_ptr(), v.data_ptr(), abi.FORMATS[k.dtype], pages, size, kv_heads, head_dim, head_dim)
