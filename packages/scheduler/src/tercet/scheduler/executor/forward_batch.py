"""One step as a model sees it: flat tokens, their positions, and an `attend` that hides where the cache is."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch

from tercet.kernels.attention.api import AttentionBackend, AttentionBatch
from tercet.scheduler.executor.kv_pool import KVPool
from tercet.scheduler.models.layer_ops import LayerCache


class ForwardMode(Enum):
    """What the rows of a step are."""

    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()

    @classmethod
    def of(cls, query_lens: Sequence[int]) -> "ForwardMode":
        """DECODE if every row brings one token, EXTEND if none does, MIXED otherwise."""
        singles = query_lens.count(1)
        if singles == len(query_lens):
            return cls.DECODE
        return cls.MIXED if singles else cls.EXTEND


@dataclass(frozen=True, eq=False, kw_only=True)
class ForwardBatch:
    """The tokens of all rows one after another. A model calls `attend` once for each of its layers."""

    mode: ForwardMode
    input_ids: torch.Tensor  # int64 [tokens]
    positions: torch.Tensor  # int64 [tokens]
    sample_index: torch.Tensor  # int64 [sampling rows]: the last token of each
    attention: Sequence[AttentionBatch]  # of each cache group
    backends: Sequence[AttentionBackend]  # of each cache group, planned for this step
    pool: KVPool

    def attend(
        self,
        layer_id: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store k and v [tokens, kv_heads, head_dim] in the cache, then attend with q [tokens, heads, head_dim]."""
        group = self.pool.group_of[layer_id]
        self.pool.store(layer_id, k, v, self.attention[group].slot_mapping)
        return self.attend_cached(layer_id, q, scale=scale, window=window, softcap=softcap, sinks=sinks)

    def cache_of(self, layer_id: int) -> LayerCache:
        """A layer's cache, for kernels that store new keys and values themselves."""
        slots = self.attention[self.pool.group_of[layer_id]].slot_mapping
        return LayerCache(*self.pool.layer(layer_id), slots, self.pool.scales_of(layer_id))

    def attend_cached(
        self,
        layer_id: int,
        q: torch.Tensor,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`attend`, where the new tokens' keys and values are in the cache already."""
        keys, values = self.pool.layer(layer_id)
        key_scale, value_scale = self.pool.scales_of(layer_id)
        backend = self.backends[self.pool.group_of[layer_id]]
        out = backend.attend(q, keys, values, scale=scale * key_scale, window=window, softcap=softcap, sinks=sinks)
        return out if value_scale == 1.0 else out * value_scale  # attention is linear in values
