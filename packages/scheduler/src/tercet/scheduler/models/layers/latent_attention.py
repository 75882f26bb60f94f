"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), over a cache of latents.

Keys and values are projections of a latent. Where the latents of earlier steps are read, they are not materialized:
the up-projection of keys is applied to queries, and the up-projection of values to the output of attention (weight
absorption). So all heads attend to one vector per token: the latent and the rotated part of the keys. A backend may
compute long prompts with materialized keys and values (`ExpandingBackend`).
"""

from functools import partial

import torch

from tercet.kernels.attention.api import AttentionParams, LatentQueries
from tercet.kernels.ops.quantized import dequantize
from tercet.scheduler.models.config.latent_config import LatentConfig
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.layers.layer_ops import Batch, NewLatents, OpsModule
from tercet.scheduler.models.layers.layers import Rotary
from tercet.scheduler.models.layers.linear import FusedLinear, RowParallelLinear
from tercet.scheduler.models.layers.norms import RMSNorm
from tercet.scheduler.models.layers.rotation import row_order, shifted_order
from tercet.scheduler.models.layers.shard import Cut, Shard

_EPS = 1e-6
"""Epsilon of the norms of latents, independent of the config."""


class HeadProjections(FusedLinear):
    """The up-projections from latents to keys and values, by head. They are used dequantized."""

    packable = False

    def __init__(self, config: ModelConfig, latent: LatentConfig, held: range) -> None:
        each = latent.nope_dim + latent.value_dim
        rows = {"kv_b_proj": Cut.span(config.heads, held, each)}
        super().__init__(latent.rank, rows, bias=False, dtype=config.dtype, quantized=config.quantization is not None)
        self._sizes = [latent.nope_dim, latent.value_dim]
        self._full: torch.Tensor | None = None

    def process_weights_after_loading(self) -> None:
        """Dequantize stored weights, and drop the quantized ones."""
        super().process_weights_after_loading()
        if self.quantized is not None:
            self._full, self.quantized = dequantize(self.quantized, self.weight.dtype), None

    @property
    def by_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the projections of keys [heads, nope_dim, rank] and values [heads, value_dim, rank]."""
        weight = self.weight if self._full is None else self._full
        w_uk, w_uv = torch.split(weight.view(-1, sum(self._sizes), weight.shape[1]), self._sizes, 1)
        return w_uk, w_uv


class LatentAttention(OpsModule):
    """Attention over latents. Each rank has all latents and some of the heads."""

    def __init__(self, config: ModelConfig, latent: LatentConfig, layer_id: int, rotary: Rotary, shard: Shard) -> None:
        super().__init__()
        held = shard.span(config.heads, "attention heads")
        self.layer_id = layer_id
        self.latent = latent
        self.heads = len(held)
        scale = latent.query_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self.params = AttentionParams(scale=scale)
        self.rotary = rotary
        linear = partial(FusedLinear, dtype=config.dtype, quantized=config.quantization is not None)
        queries = Cut.span(config.heads, held, latent.query_dim)
        first = {"q_a_proj": Cut.all(latent.query_rank)} if latent.query_rank else {"q_proj": queries}
        parts = {**first, "kv_a_proj_with_mqa": Cut.all(latent.cached_dim)}
        self.qkv_a_proj = linear(config.hidden_size, parts, bias=config.attention_bias)
        self.q_a_layernorm: RMSNorm | None = None
        self.q_b_proj: FusedLinear | None = None
        if latent.query_rank:
            self.q_a_layernorm = RMSNorm(latent.query_rank, _EPS, config.dtype)
            self.q_b_proj = linear(latent.query_rank, {"q_b_proj": queries}, bias=False)
        self.kv_a_layernorm = RMSNorm(latent.rank, _EPS, config.dtype)
        self.kv_b_proj = HeadProjections(config, latent, held)
        self.o_proj = RowParallelLinear(
            Cut.span(config.heads, held, latent.value_dim),
            config.hidden_size,
            shard,
            bias=config.attention_bias,
            dtype=config.dtype,
            quantized=config.quantization is not None,
        )
        if rotary.order is not None:
            self._set_row_orders(rotary.order)

    def _set_row_orders(self, order: torch.Tensor) -> None:
        """Set the row order of projections for half-split rotation (see `rotation`): of each query head, and of
        cached vectors.
        """
        queries = row_order(shifted_order(order, self.latent.nope_dim), self.heads)
        cached = shifted_order(order, self.latent.rank)
        if self.q_b_proj is None:
            self.qkv_a_proj.order = torch.cat([queries, cached + len(queries)])
        else:
            self.q_b_proj.order = queries
            self.qkv_a_proj.order = shifted_order(cached, self.latent.query_rank)

    def forward(
        self,
        norm: RMSNorm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        batch: Batch,
        after: RMSNorm | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute attention. See `Attention.forward`."""
        projected, residual = self.qkv_a_proj.project_normed(norm, x, residual)
        cached_dim = self.latent.cached_dim
        q, cached = torch.split(projected, [projected.shape[1] - cached_dim, cached_dim], 1)
        if self.q_a_layernorm is not None and self.q_b_proj is not None:
            q = self.q_b_proj(self.q_a_layernorm(q))
        q = self.rotary.scaled(q, positions)
        q_nope, q_pe = torch.split(q.view(len(x), self.heads, -1), [self.latent.nope_dim, self.latent.rope_dim], 2)
        w_uk, w_uv = self.kv_b_proj.by_head
        new = NewLatents(cached, self.kv_a_layernorm.value, positions, self.rotary.cache)
        queries = LatentQueries(q_nope, q_pe, w_uk, w_uv)
        out = self.ops.attend_latents(batch, self.layer_id, queries, new, self.params)
        return self.o_proj.project_onto(out.flatten(1), residual, after)
