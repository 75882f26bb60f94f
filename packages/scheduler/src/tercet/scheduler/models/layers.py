"""The layers that decoder-only models are made of: plain modules over flat tokens, with fused projections.

A batch has no batch dimension: every tensor is [tokens, ...], and `Batch.attend` knows which token belongs to whom.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import nn

from tercet.kernels.ops.activation import Gate
from tercet.kernels.ops.projection import Norm, Weight
from tercet.kernels.ops.quantised import QuantisedWeight
from tercet.kernels.ops.rope import rope_cache
from tercet.scheduler.executor.model_config import ModelConfig
from tercet.scheduler.executor.rope_config import RopeConfig
from tercet.scheduler.models.layer_ops import Batch, OpsModule
from tercet.scheduler.models.rotation import head_order, over_whole_heads, row_order
from tercet.scheduler.models.shard import Shard


class Lent(NamedTuple):
    """Rows of a weight that are somewhere else, such as in a file that is mapped into memory."""

    rows: torch.Tensor
    taken: Callable[[], None]
    """Called once the rows are read."""


class Matrix(OpsModule):
    """A module with a weight [outputs, inputs], made of one or more runs of rows.

    Whoever lays weights out in a way of its own takes them away from the module. Until then they may lie where they
    were found, so that nothing is copied that is not kept.
    """

    def __init__(self, inputs: int, runs: Sequence[int], dtype: torch.dtype, device: str | None = None) -> None:
        super().__init__()
        self.weight = _parameter(sum(runs), inputs, dtype=dtype, device=device)
        self._runs = list(runs)
        self._lent: dict[int, Lent] = {}

    def lend(self, run: int | None, lent: Lent) -> None:
        """Leave a run of rows where it is, in whatever dtype, until the weight is taken; None: all runs, as one."""
        if run is not None:
            self._lent[run] = lent
            return
        for index, rows in enumerate(torch.split(lent.rows, self._runs)):
            last = index == len(self._runs) - 1
            self._lent[index] = Lent(rows, lent.taken if last else _nothing)

    def take(self) -> list[torch.Tensor]:
        """The runs of rows in the weight's dtype, of which the module keeps nothing."""
        runs = list(torch.split(self.weight.data, self._runs))
        for index, lent in self._lent.items():
            runs[index] = lent.rows.to(self.weight.dtype)
            lent.taken()
        self._lent.clear()
        self.weight.data = torch.empty(0)
        return runs


class Linear(Matrix):
    """x @ weight.T + bias. Of a quantised model the weight is on no device until it is loaded, in either form."""

    def __init__(
        self, inputs: int, outputs: int | Sequence[int], *, bias: bool, dtype: torch.dtype, quantised: bool = False
    ) -> None:
        runs = [outputs] if isinstance(outputs, int) else outputs
        super().__init__(inputs, runs, dtype, "meta" if quantised else None)
        self.bias = _parameter(sum(runs), dtype=dtype) if bias else None
        self.quantised: QuantisedWeight | None = None
        self.order: torch.Tensor | None = None
        """Which row of a checkpoint each row is, int64 [outputs], where it is not the same one."""

    def put_in_order(self) -> None:
        """Follow `order`, once all that is stored is loaded. Rows that were lent follow it when they are taken."""
        if self.order is None:
            return
        if self.quantised is not None:
            self.quantised = self.quantised.rows(self.order)
        elif not self._lent:
            self.weight.data = self.weight.data[self.order]
        if self.bias is not None:
            self.bias.data = self.bias.data[self.order]

    def take(self) -> list[torch.Tensor]:
        """See `Matrix.take`."""
        lent, runs = bool(self._lent), super().take()
        if self.order is None or not lent:
            return runs
        return list(torch.split(torch.cat(runs)[self.order], self._runs))

    @property
    def value(self) -> Weight:
        """What is computed with."""
        return self.weight if self.quantised is None else self.quantised

    def forward(self, x: torch.Tensor, *, gate: Gate | None = None) -> torch.Tensor:
        """[tokens, inputs] -> [tokens, outputs]: see `tercet.kernels.ops.projection` for this and what follows."""
        return self.ops.project(x, self.value, self.bias, gate=gate)

    def of_normed(
        self, norm: "RMSNorm", x: torch.Tensor, residual: torch.Tensor | None, *, gate: Gate | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(what it gives of the normalised x + residual, x + residual)."""
        return self.ops.project_normed(x, residual, norm.value, self.value, self.bias, gate=gate)

    def onto(
        self, x: torch.Tensor, residual: torch.Tensor, after: "RMSNorm | None" = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(what it gives of x, normalised if there is a norm `after` it; what is yet to be added to that)."""
        if after is not None:
            return after(self(x)), residual
        return self.ops.project_onto(x, residual, self.value, self.bias)


class FusedLinear(Linear):
    """Projections of one input, computed as one: `parts` maps each one's name in checkpoints to its outputs.

    A checkpoint may also hold them as they are here, under this module's own name (see `FusedNames`).
    """

    def __init__(
        self, inputs: int, parts: dict[str, int], *, bias: bool, dtype: torch.dtype, quantised: bool = False
    ) -> None:
        super().__init__(inputs, list(parts.values()), bias=bias, dtype=dtype, quantised=quantised)
        self.parts = parts


class RMSNorm(OpsModule):
    """Root mean square normalisation."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _parameter(size, dtype=dtype)
        self.eps = eps

    @property
    def value(self) -> Norm:
        """What is computed with."""
        return Norm(self.weight, self.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        return self.ops.rmsnorm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(normalised x + residual, x + residual); without a residual, x is all there is."""
        if residual is None:
            return self(x), x
        return self.ops.add_rmsnorm(x, residual, self.weight, self.eps)


class CentredNorm(RMSNorm):
    """One of which checkpoints hold how far its weight is from 1. That sum is kept in float32, so that it is exact."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:  # noqa: ARG002 - the model's
        super().__init__(size, eps, torch.float32)

    def centre(self) -> None:
        """Make the weight of what a checkpoint holds."""
        self.weight.data += 1


class Rotary(nn.Module):
    """Of layers that rotate alike: the angles of every position, as cosines and sines, and the order of heads."""

    cache: torch.Tensor

    def __init__(self, config: ModelConfig, rope: RopeConfig | None = None) -> None:
        """`rope` is in place of the config's."""
        super().__init__()
        rope = rope or config.rope
        table = rope_cache(config.context_length, config.rotary_dim, rope.theta, rope.scaling)
        self.register_buffer("cache", over_whole_heads(table, config.head_dim), persistent=False)
        self.order = head_order(config.head_dim, config.rotary_dim, interleaved=rope.interleaved)


class Attention(OpsModule):
    """Grouped-query attention with rotary positions, and what families add: biases, and norms of queries and keys.

    `qk_norm` is over each head, or over all heads of a projection at once; `norm` is its kind. `sinks` are one for each
    head.
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
    ) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.window = config.window_of(layer_id)
        self.heads = shard.share(config.heads, "attention heads")
        self.kv_heads = shard.share(config.kv_heads, "key-value heads")
        self.head_dim = config.head_dim
        self.scale = self.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self.softcap = config.softcap
        self.rotary = rotary
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        quantised = config.quantization is not None
        parts = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        self.qkv_proj = FusedLinear(config.hidden_size, parts, bias=input_bias, dtype=config.dtype, quantised=quantised)
        if rotary.order is not None:
            self.qkv_proj.order = row_order(rotary.order, self.heads + self.kv_heads, keys)
        self.o_proj = Linear(queries, config.hidden_size, bias=output_bias, dtype=config.dtype, quantised=quantised)
        self.norms_heads = qk_norm == "heads"
        self.q_norm, self.k_norm = (
            None
            if qk_norm == "none"
            else norm(self.head_dim if self.norms_heads else size, config.rms_norm_eps, config.dtype)
            for size in (queries, keys)
        )
        self.sinks = _parameter(self.heads, dtype=config.dtype) if sinks else None

    def put_in_order(self) -> None:
        """Lay heads out as they are rotated (see `rotation`), once all that is stored is loaded."""
        self.qkv_proj.put_in_order()
        if self.rotary.order is not None and self.q_norm is not None and self.k_norm is not None:
            for norm in (self.q_norm, self.k_norm):
                heads = len(norm.weight) // self.head_dim
                norm.weight.data = norm.weight.data[row_order(self.rotary.order, heads)]

    def forward(
        self,
        norm: RMSNorm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        batch: Batch,
        after: RMSNorm | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(what it gives of the normalised x + residual, what is yet to be added to that); all [tokens, hidden].

        With a norm `after` it, what it gives is normalised, too.
        """
        qkv, residual = self.qkv_proj.of_normed(norm, x, residual)
        heads = qkv.view(len(x), -1, self.head_dim)
        q, k, v = torch.split(heads, [self.heads, self.kv_heads, self.kv_heads], 1)
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            if self.norms_heads:
                norms = self.q_norm.weight, self.k_norm.weight, self.q_norm.eps
            else:
                q, k = self.q_norm(q.flatten(1)).view_as(q), self.k_norm(k.flatten(1)).view_as(k)
        out = self.ops.attend(
            batch,
            self.layer_id,
            (q, k, v),
            positions,
            self.rotary.cache,
            norms,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
        )
        return self.o_proj.onto(out.flatten(1), residual, after)


class GatedMLP(OpsModule):
    """down(act(gate(x)) * up(x))."""

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        *,
        bias: bool = False,
        size: int | None = None,
        gate: Gate = "silu",
    ) -> None:
        """`size` is the intermediate size, if it is not the config's."""
        super().__init__()
        self.gate: Gate = gate
        size = shard.share(size or config.intermediate_size, "MLP columns")
        quantised = config.quantization is not None
        parts = {"gate_proj": size, "up_proj": size}
        self.gate_up_proj = FusedLinear(config.hidden_size, parts, bias=bias, dtype=config.dtype, quantised=quantised)
        self.down_proj = Linear(size, config.hidden_size, bias=bias, dtype=config.dtype, quantised=quantised)

    def forward(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None, after: RMSNorm | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As attention: see there."""
        gated, residual = self.gate_up_proj.of_normed(norm, x, residual, gate=self.gate)
        return self.down_proj.onto(gated, residual, after)

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Of what is normalised already: [tokens, hidden] -> [tokens, hidden]."""
        out: torch.Tensor = self.down_proj(self.gate_up_proj(x, gate=self.gate))
        return out


class Embedding(Matrix):
    """One vector for each token id, times what the config says."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.hidden_size, [config.vocab_size], config.dtype)
        self.scale = config.embedding_scale

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] -> [tokens, hidden]."""
        vectors = self.ops.embedding(input_ids, self.weight)
        return vectors if self.scale == 1 else vectors * self.scale


def _nothing() -> None:
    """Of a weight that is taken in several runs, for all but the last."""


def _parameter(*shape: int, dtype: torch.dtype, device: str | None = None) -> nn.Parameter:
    """Uninitialised: weights are loaded into it."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
