"""The layers of decoder-only models: plain modules over flat tokens, with fused projections.

There is no batch dimension: every tensor is [tokens, ...], and `Batch.attend` knows the sequence of each token.
"""

from typing import Literal, cast

import torch
from torch import nn
from torch.nn.functional import pad

from tercet.kernels.attention.api import AttentionParams
from tercet.kernels.ops.activation import Gate, squared_relu
from tercet.kernels.ops.rope import apply_rope, rope_cache
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.config.rope_config import RopeConfig
from tercet.scheduler.models.layers.layer_ops import Batch, CachedBatch, OpsModule
from tercet.scheduler.models.layers.linear import FusedLinear, Matrix, RowParallelLinear
from tercet.scheduler.models.layers.norms import RMSNorm, WeightlessNorm
from tercet.scheduler.models.layers.parameters import empty_parameter
from tercet.scheduler.models.layers.rotation import (
    gates_last,
    head_order,
    identity_table,
    keep_pairs,
    pad_to_heads,
    row_order,
)
from tercet.scheduler.models.layers.shard import WHOLE, Cut, Shard


class Rotary(nn.Module):
    """The rotary table of layers that rotate equally (cosines and sines of every position), and the order of head
    elements.
    """

    cache: torch.Tensor
    parts: torch.Tensor | None
    query_factors: torch.Tensor | None

    def __init__(self, config: ModelConfig, rope: RopeConfig | None = None, head_dim: int | None = None) -> None:
        """Create the table; `rope` and `head_dim` replace the config's."""
        super().__init__()
        rope = rope or config.rope
        size = head_dim or config.rotated_head_dim
        rotary_dim = rope.rotated(size)
        table = pad_to_heads(rope_cache(config.context_length, rotary_dim, rope.theta, rope.scaling), size)
        self.spare = len(table)
        if rope.proportion < 1:
            table = keep_pairs(table, int(rope.proportion * size // 2))
        if rope.sections:
            table = pad(table, (0, 0, 0, config.spare_positions))
        self.register_buffer("cache", table, persistent=False)
        parts = torch.tensor(2 * rope.parts(size // 2)) if rope.sections else None
        self.register_buffer("parts", parts, persistent=False)
        self.order = head_order(size, rotary_dim, interleaved=rope.interleaved)
        scaling = rope.query_scaling
        factors = None if scaling is None else scaling.factors(config.context_length)
        self.register_buffer("query_factors", factors, persistent=False)

    def write(self, positions: torch.Tensor) -> None:
        """Write the rows of positions of three parts, int64 [tokens, 3], into the table from row `spare` on."""
        if self.parts is None:
            raise RuntimeError("positions here have one part")
        rows = self.cache[self.spare : self.spare + len(positions)]
        rows.copy_(self.cache.gather(0, positions[:, self.parts]))

    def scaled(self, q: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Multiply queries [tokens, ...] by the factors of their positions."""
        if self.query_factors is None:
            return q
        factors = self.query_factors[positions].to(q.dtype)
        return q * factors.view(-1, *[1] * (q.dim() - 1))


class Unrotated(Rotary):
    """The table of layers without rotary embedding: an identity rotation, so that kernels have one kind of layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.cache = identity_table(self.cache)


class Attention(OpsModule):
    """Grouped-query attention with rotary positions, optional biases, and optional norms of queries and keys.

    `qk_norm` is over each head, or over all heads of a projection at once; `norm` is its class. `sinks` has one value
    per head. If `gated`, the output is multiplied by the sigmoid of a gate, which checkpoints store with the queries.

    A layer without keys and values of its own (`ModelConfig.shared_caches`) reads those of another. `value_norm` is
    over each head of values; if `keys_as_values`, values are the keys before norm and rotation. Values are multiplied
    by `value_scale`.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        rotary: Rotary,
        shard: Shard,
        *,
        input_bias: bool = False,
        output_bias: bool = False,
        qk_norm: Literal["none", "heads", "projections"] = "none",
        norm: type[RMSNorm] = RMSNorm,
        sinks: bool = False,
        gated: bool = False,
        value_norm: bool = False,
        keys_as_values: bool = False,
        value_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.shares = layer_id in config.shared_caches
        self.layer_id = config.shared_caches.get(layer_id, layer_id)
        if shard.size > 1 and qk_norm == "projections":
            raise ValueError("heads that are normalised as one cannot be split over processes")
        held = shard.span(config.heads, "attention heads")
        shape = config.heads_of(layer_id)
        kv_held = shard.shared_span(shape.kv_heads, "key-value heads")
        self.heads, self.kv_heads = len(held), len(kv_held)
        self.head_dim, self.value_dim = shape.head_dim, shape.value_dim
        self.rotary = rotary
        queries = Cut.span(config.heads, held, self.head_dim)
        keys = Cut.span(shape.kv_heads, kv_held, self.head_dim)
        values = Cut.span(shape.kv_heads, kv_held, self.value_dim)
        size, dtype, quantized = config.hidden_size, config.dtype, config.quantization is not None
        self.gates = self.heads if gated else 0
        stored = Cut.span(config.heads, held, 2 * self.head_dim) if gated else queries
        own = {} if self.shares else {"k_proj": keys} if keys_as_values else {"k_proj": keys, "v_proj": values}
        self.sizes = [queries.held, *(part.held for part in own.values())]
        parts = {"q_proj": stored, **own}
        self.qkv_proj = FusedLinear(size, parts, bias=input_bias, dtype=dtype, quantized=quantized)
        if rotary.order is not None:
            self.qkv_proj.order = row_order(rotary.order, self.heads + self.kv_heads, values.held)
        if gated:
            self.qkv_proj.order = gates_last(self.qkv_proj.order, self.heads, self.kv_heads, self.head_dim)
        inputs = Cut.span(config.heads, held, self.value_dim)
        self.o_proj = RowParallelLinear(inputs, size, shard, bias=output_bias, dtype=dtype, quantized=quantized)
        self.norms_heads = qk_norm == "heads"
        self.q_norm, self.k_norm = (
            None
            if qk_norm == "none"
            else norm(self.head_dim if self.norms_heads else each.held, config.rms_norm_eps, dtype)
            for each in (queries, keys)
        )
        if self.shares:
            self.k_norm = None
        has_norm = value_norm and not self.shares
        self.v_norm = WeightlessNorm(self.value_dim, config.rms_norm_eps, dtype) if has_norm else None
        self.value_scale = value_scale
        self.sinks = empty_parameter(self.heads, dtype=dtype) if sinks else None
        self.cuts = {"sinks": Cut.span(config.heads, held)}
        self.params = self._attention_params(config, layer_id)

    def _attention_params(self, config: ModelConfig, layer_id: int) -> AttentionParams:
        return AttentionParams(
            scale=self.head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
            window=config.window_of(layer_id),
            chunk=config.chunk_of(layer_id),
            softcap=config.softcap,
            sinks=self.sinks,
        )

    def process_weights_after_loading(self) -> None:
        """Reorder the norms of heads for half-split rotation (see `rotation`); `qkv_proj` reorders the heads."""
        for norm in (self.q_norm, self.k_norm):
            if self.rotary.order is not None and norm is not None:
                heads = len(norm.weight) // self.head_dim
                norm.weight.data = norm.weight.data[row_order(self.rotary.order, heads)]

    def forward(
        self,
        norm: RMSNorm | None,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        batch: Batch,
        after: RMSNorm | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend with the normalized x + residual. Return the output and the residual still to be added; all [tokens,
        hidden].

        With a norm `after`, the output is normalized, too.
        """
        qkv, residual = self.qkv_proj.project_normed(norm, x, residual)
        return self.o_proj.project_onto(self.attend(qkv, positions, batch), residual, after)

    def attend(self, qkv: torch.Tensor, positions: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Attend with the output of `qkv_proj`. Return the input of `o_proj`."""
        q, *others = qkv.split_with_sizes([*self.sizes, self.gates * self.head_dim], 1)
        q = self.rotary.scaled(q.view(len(qkv), self.heads, self.head_dim), positions)
        if self.shares:
            out = self._attend_shared(q, positions, batch)
        else:
            out = self._attend(q, others[0], others[-2], positions, batch)
        if self.gates:
            out = out * others[-1].view_as(out).sigmoid()
        return out.flatten(1)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """Attend with q [tokens, heads, head_dim] and new k and v [tokens, kv_heads * dim]."""
        k, v = k.view(len(q), self.kv_heads, -1), v.view(len(q), self.kv_heads, -1)
        norms = None
        if self.v_norm is not None:
            v = self.v_norm(v)
        if self.value_scale != 1:
            v = v * self.value_scale
        if self.q_norm is not None and self.k_norm is not None:
            if self.norms_heads:
                norms = self.q_norm.weight, self.k_norm.weight, self.q_norm.eps
            else:
                q, k = self.q_norm(q.flatten(1)).view_as(q), self.k_norm(k.flatten(1)).view_as(k)
        return self.ops.attend(batch, self.layer_id, (q, k, v), positions, self.rotary.cache, norms, self.params)

    def _attend_shared(self, q: torch.Tensor, positions: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Attend with q [tokens, heads, head_dim] to the keys and values that another layer has cached."""
        q = q if self.q_norm is None else self.q_norm(q)
        q = apply_rope(q, q[:, :1], positions, self.rotary.cache)[0]
        return cast("CachedBatch", batch).attend_cached(self.layer_id, q, self.params)


class GatedMLP(OpsModule):
    """A gated MLP: down(act(gate(x)) * up(x))."""

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        *,
        bias: bool = False,
        size: int | None = None,
        gate: Gate = "silu",
    ) -> None:
        """Create the MLP; `size` is the intermediate size if it differs from the config's."""
        super().__init__()
        self.gate: Gate = gate
        whole = size or config.intermediate_size
        columns = Cut.span(whole, shard.span(whole, "MLP columns"))
        quantized = config.quantization is not None
        parts = {"gate_proj": columns, "up_proj": columns}
        self.gate_up_proj = FusedLinear(config.hidden_size, parts, bias=bias, dtype=config.dtype, quantized=quantized)
        self.down_proj = RowParallelLinear(
            columns, config.hidden_size, shard, bias=bias, dtype=config.dtype, quantized=quantized
        )

    def forward(
        self, norm: RMSNorm | None, x: torch.Tensor, residual: torch.Tensor | None, after: RMSNorm | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply the MLP to the normalized x + residual. See `Attention.forward`."""
        gated, residual = self.gate_up_proj.project_normed(norm, x, residual, gate=self.gate)
        return self.down_proj.project_onto(gated, residual, after)

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's summand of the output, for normalized x: [tokens, hidden] -> [tokens, hidden]."""
        return self.down_proj.partial(self.gate_up_proj(x, gate=self.gate))


class SquaredReLUMLP(OpsModule):
    """An MLP without a gate: down(relu(up(x))**2)."""

    def __init__(self, config: ModelConfig, shard: Shard, *, bias: bool = False, size: int | None = None) -> None:
        """Create the MLP; `size` is the intermediate size if it differs from the config's."""
        super().__init__()
        whole = size or config.intermediate_size
        columns = Cut.span(whole, shard.span(whole, "MLP columns"))
        hidden, dtype, quantized = config.hidden_size, config.dtype, config.quantization is not None
        self.up_proj = FusedLinear(hidden, {"up_proj": columns}, bias=bias, dtype=dtype, quantized=quantized)
        self.down_proj = RowParallelLinear(columns, hidden, shard, bias=bias, dtype=dtype, quantized=quantized)

    def forward(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None, after: RMSNorm | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `GatedMLP.forward`."""
        up, residual = self.up_proj.project_normed(norm, x, residual)
        return self.down_proj.project_onto(squared_relu(up), residual, after)

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """See `GatedMLP.partial`."""
        return self.down_proj.partial(squared_relu(self.up_proj(x)))


class VocabParallelEmbedding(Matrix):
    """Token embeddings times the config's scale. Each rank has some of the vectors."""

    def __init__(self, config: ModelConfig, shard: Shard = WHOLE) -> None:
        ids = shard.uneven_span(config.vocab_size)
        super().__init__(config.hidden_size, [len(ids)], config.dtype)
        self.cuts = {"weight": Cut.span(config.vocab_size, ids)}
        self.scale = config.embedding_scale
        self._ids = ids
        self._shard = shard

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return embeddings [tokens, hidden] of input ids [tokens]."""
        vectors = self._vectors(input_ids)
        return vectors if self.scale == 1 else vectors * self.scale

    def _vectors(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self._shard.size == 1:
            return self.ops.embedding(input_ids, self.weight)
        elsewhere = (input_ids < self._ids.start) | (input_ids >= self._ids.stop)
        places = (input_ids - self._ids.start).masked_fill_(elsewhere, 0)
        return self._shard.collectives.all_reduce(
            self.ops.embedding(places, self.weight).masked_fill_(elsewhere[:, None], 0)
        )
