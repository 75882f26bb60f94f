"""Chunked attention: a token sees itself and the earlier tokens of its chunk of positions, and no other chunk.

Within a chunk this is plain attention. So each row is split where its new tokens enter another chunk, and each part is
a row whose pages begin at its chunk.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

import torch

from tercet.kernels.attention.api import AttentionBackend, AttentionBatch, AttentionParams


class ChunkedAttention:
    """Backend for models with chunks in some layers, an `AttentionBackend` over one of another kind for each chunk."""

    capturable = False
    bidirectional = False

    def __init__(self, backend: Callable[[], AttentionBackend]) -> None:
        self._make = backend
        self._whole = backend()
        self._chunks: dict[int, AttentionBackend] = {}
        self._planned: set[int] = set()
        self._params: dict[AttentionParams, AttentionParams] = {}
        self._batch: AttentionBatch | None = None

    def plan(self, batch: AttentionBatch) -> None:
        """See `AttentionBackend.plan`. Chunks are planned at their first layer."""
        self._batch = batch
        self._planned = set()
        self._whole.plan(batch)

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        params: AttentionParams,
        key_scale: float = 1.0,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`. Raises ValueError for a chunk that is no multiple of the page size."""
        if not params.chunk:
            return self._whole.attend(q, k_cache, v_cache, params, key_scale)
        if params not in self._params:
            self._params[params] = replace(params, chunk=0)
        backend = self._of_chunk(params.chunk)
        return backend.attend(q, k_cache, v_cache, self._params[params], key_scale)

    def _of_chunk(self, chunk: int) -> AttentionBackend:
        if self._batch is None:
            raise RuntimeError("attend was called before plan")
        if chunk not in self._chunks:
            self._chunks[chunk] = self._make()
        if chunk not in self._planned:
            self._chunks[chunk].plan(split_at_chunks(self._batch, chunk))
            self._planned.add(chunk)
        return self._chunks[chunk]


def split_at_chunks(batch: AttentionBatch, chunk: int) -> AttentionBatch:
    """Return the batch with a row for each chunk that a row's new tokens lie in, which has that chunk's tokens alone.

    Raises ValueError for a chunk that is no multiple of the page size.
    """
    if chunk % batch.page_size:
        raise ValueError(f"chunks of {chunk} tokens are no multiple of the page size {batch.page_size}")
    rows, starts, query_lens, kv_lens = [], [], [], []
    for row, (count, length) in enumerate(zip(batch.host_query_lens, batch.host_kv_lens, strict=True)):
        first = length - count
        while first < length:
            start = first // chunk * chunk
            last = min(length, start + chunk)
            rows.append(row)
            starts.append(start // batch.page_size)
            query_lens.append(last - first)
            kv_lens.append(last - start)
            first = last
    device, width = batch.page_table.device, batch.page_table.shape[1]
    index = torch.tensor([rows, starts]).to(device)
    pages = (index[1, :, None] + torch.arange(chunk // batch.page_size, device=device)).clamp_(max=width - 1)
    return replace(
        batch,
        query_start=torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32).to(device),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32).to(device),
        page_table=batch.page_table[index[0, :, None], pages],
        host_query_lens=query_lens,
        host_kv_lens=kv_lens,
    )
