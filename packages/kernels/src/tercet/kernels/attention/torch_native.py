"""Attention in plain torch: exact, on any device, fast enough for small models.

Scores, softmax and sums are float32. Query heads that share a KV head become rows of one matrix product. The padding of
a batched row repeats that row's own last token, so a NaN in a row's cache cannot affect other rows.
"""

import math
from dataclasses import dataclass, replace

import torch

from tercet.kernels.attention.api import AttentionBatch, AttentionParams
from tercet.kernels.attention.latent import latent_rank

_SCORES = 1 << 20
"""Maximum number of scores in memory, which bounds a long extend to a few times 4 MiB."""

_GATHERED = 1 << 20
"""Maximum number of key elements gathered at once for decodes, unless a single row has more."""

_WASTE = 1.5
"""Decodes are padded to one length while that reads at most this many times the keys they need."""


@dataclass(frozen=True, eq=False)
class _Decodes:
    """Decode rows of similar length, padded to the longest, with the indices of their keys."""

    rows: torch.Tensor  # int64 [n], row indices, which for decodes are also token indices
    index: torch.Tensor  # int64 [n * longest], positions in the flat cache
    padding: torch.Tensor  # bool [n, 1, longest]


@dataclass(frozen=True, eq=False)
class _Extend:
    """A row with several new tokens: tokens [first, last) of the step, and the indices of its keys."""

    first: int
    last: int
    index: torch.Tensor  # int64 [kv_len]
    seen: torch.Tensor | None = None  # see `AttentionBatch.seen`


class _Scratch:
    """Reused buffers for gathered keys and values; fresh allocations would cost more than the writes."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def gather(self, name: str, cache: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return float32 [len(index), kv_heads, head_dim], valid until the next call with the same name."""
        shape = (len(index), *cache.shape[2:])
        gathered = torch.index_select(cache.flatten(0, 1), 0, index, out=self._take(name, shape, cache))
        if cache.dtype == torch.float32:
            return gathered
        return self._take(name, shape, cache, torch.float32).copy_(gathered)

    def _take(
        self, name: str, shape: tuple[int, ...], like: torch.Tensor, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        key = name, dtype or like.dtype
        size = math.prod(shape)
        if key not in self._buffers or self._buffers[key].numel() < size:
            self._buffers[key] = torch.empty(size, dtype=key[1], device=like.device)
        return self._buffers[key][:size].view(shape)


class TorchNativeAttention:
    """Plain-torch backend, an `AttentionBackend`."""

    capturable = False
    bidirectional = True

    def __init__(self) -> None:
        self._batch: AttentionBatch | None = None
        self._decodes: dict[int, list[_Decodes]] = {}
        self._extends: list[_Extend] = []
        self._scratch = _Scratch()

    def plan(self, batch: AttentionBatch) -> None:
        """Locate the keys of extends. Decodes are located once for each window, at its first layer."""
        self._batch = batch
        self._decodes = {}
        self._extends = _find_extends(batch)

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        params: AttentionParams,
        key_scale: float = 1.0,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        if key_scale != 1.0:
            params = replace(params, scale=params.scale * key_scale)
        gather = self._scratch.gather
        out = q.new_empty(*q.shape[:2], v_cache.shape[3])
        for decodes in self._padded_decodes(k_cache, params.window):
            k, v = gather("k", k_cache, decodes.index), gather("v", v_cache, decodes.index)
            out[decodes.rows] = _decode(q[decodes.rows], k, v, decodes.padding, params).to(q.dtype)
        for extend in self._extends:
            k, v = gather("k", k_cache, extend.index), gather("v", v_cache, extend.index)
            _extend(q, k, v, extend, params, out)
        return out

    def _padded_decodes(self, k_cache: torch.Tensor, window: int) -> list[_Decodes]:
        if self._batch is None:
            raise RuntimeError("attend was called before plan")
        if window not in self._decodes:
            most = max(1, _GATHERED // k_cache[0, 0].numel())
            self._decodes[window] = _pad_decodes(self._batch, window, most)
        return self._decodes[window]


class TorchNativeLatent(TorchNativeAttention):
    """Plain-torch backend of latent attention, which gathers each vector once."""

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        params: AttentionParams,
        key_scale: float = 1.0,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        rank = latent_rank(v_cache, params)
        if key_scale != 1.0:
            params = replace(params, scale=params.scale * key_scale)
        out = q.new_empty(*q.shape[:2], rank)
        for decodes in self._padded_decodes(k_cache, 0):
            vectors = self._scratch.gather("vectors", k_cache, decodes.index)
            result = _decode(q[decodes.rows], vectors, vectors[..., :rank], decodes.padding, params)
            out[decodes.rows] = result.to(q.dtype)
        for extend in self._extends:
            vectors = self._scratch.gather("vectors", k_cache, extend.index)
            _extend(q, vectors, vectors[..., :rank], extend, params, out)
        return out


def _softmax(scores: torch.Tensor, hidden: torch.Tensor, head: slice, params: AttentionParams) -> torch.Tensor:
    """Return the softmax of float32 scores [..., group, queries, keys] of the query heads `head`.

    Scores are masked where `hidden`. Overwrites the scores.
    """
    if params.softcap:
        scores = scores.div_(params.softcap).tanh_().mul_(params.softcap)
    scores = scores.masked_fill_(hidden, float("-inf"))
    if params.sinks is None:
        return torch.softmax(scores, dim=-1)
    sinks = params.sinks[head].float().view(-1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]


def _find_extends(batch: AttentionBatch) -> list[_Extend]:
    """Return the rows that are no decodes, with the indices of their keys."""
    extends = []
    first = batch.decodes
    for row in range(batch.decodes, batch.rows):
        last = first + batch.host_query_lens[row]
        positions = torch.arange(batch.host_kv_lens[row], device=batch.page_table.device)
        extends.append(_Extend(first, last, _locate(batch, row, positions), batch.seen))
        first = last
    return extends


def _locate(batch: AttentionBatch, row: int | torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the indices of a row's tokens in a cache flattened to [pages * page_size, ...]."""
    pages = batch.page_table[row, positions // batch.page_size]
    return pages.long() * batch.page_size + positions % batch.page_size


def _pad_decodes(batch: AttentionBatch, window: int, most: int) -> list[_Decodes]:
    """Group decode rows by length, at most `most` tokens a group, so that a very long row does not pad all others."""
    lengths = [min(kv_len, window or kv_len) for kv_len in batch.host_kv_lens[: batch.decodes]]
    groups: list[list[int]] = []
    needed = 0
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        needed += lengths[row]
        if groups and (len(groups[-1]) + 1) * lengths[row] <= min(most, _WASTE * needed):
            groups[-1].append(row)
        else:
            groups.append([row])
            needed = lengths[row]
    return [_pad(batch, group, [lengths[row] for row in group]) for group in groups]


def _pad(batch: AttentionBatch, rows: list[int], lengths: list[int]) -> _Decodes:
    device = batch.page_table.device
    row_index = torch.tensor(rows, device=device)
    offset = torch.arange(max(lengths), device=device)
    first = torch.tensor([batch.host_kv_lens[row] - length for row, length in zip(rows, lengths, strict=True)])
    padding = offset >= torch.tensor(lengths, device=device)[:, None]
    last = batch.kv_lens[row_index].long()[:, None] - 1
    positions = torch.minimum(first.to(device)[:, None] + offset, last)
    index = _locate(batch, row_index[:, None].expand_as(positions), positions)
    return _Decodes(row_index, index.flatten(), padding[:, None])


def _decode(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, padding: torch.Tensor, params: AttentionParams
) -> torch.Tensor:
    """Return the attention of one token for each row: q [n, heads, head_dim] -> float32 [n, heads, head_dim].

    keys and values are float32 [n * longest, kv_heads, head_dim]; values, and then the result, may be narrower.
    """
    rows, heads, head_dim = q.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    k, v = (x.view(rows, -1, kv_heads, x.shape[2]) for x in (keys, values))
    query = q.float().view(rows, kv_heads, group, head_dim) * params.scale
    out = torch.empty(rows, kv_heads, group, v.shape[3], device=q.device)
    for head in range(kv_heads):  # one batched product over rows for each head: avoids a transposed copy
        scores = torch.bmm(query[:, head], k[:, :, head].transpose(1, 2))  # [n, group, keys]
        mine = slice(head * group, (head + 1) * group)
        weights = _softmax(scores[:, :, None], padding[:, None], mine, params)[:, :, 0]
        out[:, head] = torch.bmm(weights, v[:, :, head])
    return out.view(rows, heads, -1)


def _extend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    extend: _Extend,
    params: AttentionParams,
    out: torch.Tensor,
) -> None:
    """Write the attention of a row's new tokens to `out`, in blocks of queries that bound the memory of scores."""
    heads = q.shape[1]
    kv_len, kv_heads, head_dim = keys.shape
    k = keys.permute(1, 2, 0)  # [kv_heads, head_dim, keys]
    v = values.transpose(0, 1)  # [kv_heads, keys, head_dim]
    before = kv_len - (extend.last - extend.first)
    block = max(1, _SCORES // (heads * kv_len))
    window = params.window
    for first in range(extend.first, extend.last, block):
        last = min(first + block, extend.last)
        queries = last - first
        positions = torch.arange(before + first - extend.first, before + last - extend.first, device=q.device)
        start = max(0, before + first - extend.first - window + 1) if window else 0
        ends = positions + 1 if extend.seen is None else extend.seen[first:last]
        stop = before + last - extend.first if extend.seen is None else int(ends.max())
        seen = torch.arange(start, stop, device=q.device)
        hidden = seen >= ends[:, None]  # [queries, keys]
        if window:
            hidden |= seen <= positions[:, None] - window
        query = q[first:last].float().view(queries, kv_heads, -1, head_dim).permute(1, 2, 0, 3) * params.scale
        folded = query.reshape(kv_heads, -1, head_dim)  # [kv_heads, group * queries, head_dim]
        scores = torch.bmm(folded, k[:, :, start:stop]).view(heads, queries, -1)
        weights = _softmax(scores, hidden, slice(None), params).view(kv_heads, -1, stop - start)
        result = torch.bmm(weights, v[:, start:stop]).view(heads, queries, -1)
        out[first:last] = result.transpose(0, 1).to(q.dtype)
