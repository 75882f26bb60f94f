"""Naive reference of attention: one token and one head at a time. Backends are tested against it."""

import torch

from tercet.kernels.attention.api import AttentionBatch, AttentionParams
from tercet.kernels.attention.latent import latent_rank


class ReferenceAttention:
    """Reference `AttentionBackend` in float64, for tests and `tercet-kernels check` only."""

    capturable = False
    bidirectional = True

    def __init__(self) -> None:
        self._batch: AttentionBatch | None = None

    def plan(self, batch: AttentionBatch) -> None:
        """See `AttentionBackend.plan`."""
        self._batch = batch

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
        out = torch.empty(*q.shape[:2], v_cache.shape[3], dtype=torch.float64)
        group = q.shape[1] // k_cache.shape[2]
        scale, window, softcap, sinks = params.scale * key_scale, params.window, params.softcap, params.sinks
        token = 0
        for row in range(batch.rows):
            kv_len, query_len = batch.host_kv_lens[row], batch.host_query_lens[row]
            earliest = max(0, kv_len - query_len - window + 1) if window else 0
            row_keys, row_values = (_gather(each, batch, row, range(earliest, kv_len)) for each in (k_cache, v_cache))
            for position in range(kv_len - query_len, kv_len):
                first = max(0, position - window + 1) if window else 0
                first = max(first, position // params.chunk * params.chunk) if params.chunk else first
                last = position + 1 if batch.seen is None else int(batch.seen[token])
                seen = slice(first - earliest, last - earliest)
                keys, values = row_keys[seen], row_values[seen]
                for head in range(q.shape[1]):
                    scores = keys[:, head // group] @ q[token, head].double() * scale
                    if softcap:
                        scores = softcap * torch.tanh(scores / softcap)
                    if sinks is not None:
                        scores = torch.cat([scores, sinks[head].double().reshape(1)])
                    weights = torch.softmax(scores, dim=0)[: len(keys)]
                    out[token, head] = weights @ values[:, head // group]
                token += 1
        return out.to(q.dtype)


class ReferenceLatent(ReferenceAttention):
    """Reference of latent attention in float64."""

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        params: AttentionParams,
        key_scale: float = 1.0,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        batch, rank = self._batch, latent_rank(v_cache, params)
        if batch is None:
            raise RuntimeError("attend was called before plan")
        out = torch.empty(*q.shape[:2], rank, dtype=torch.float64)
        token = 0
        for row in range(batch.rows):
            kv_len, query_len = batch.host_kv_lens[row], batch.host_query_lens[row]
            vectors = _gather(k_cache[:, :, 0], batch, row, range(kv_len))
            for position in range(kv_len - query_len, kv_len):
                seen = vectors[: position + 1]
                for head in range(q.shape[1]):
                    weights = torch.softmax(seen @ q[token, head].double() * (params.scale * key_scale), dim=0)
                    out[token, head] = weights @ seen[:, :rank]
                token += 1
        return out.to(q.dtype)


def _gather(cache: torch.Tensor, batch: AttentionBatch, row: int, positions: range) -> torch.Tensor:
    """Return a row's cached vectors at some positions, one lookup each: float64 [positions, ...]."""
    size = batch.page_size
    return torch.stack([cache[int(batch.page_table[row, p // size]), p % size].double() for p in positions])
