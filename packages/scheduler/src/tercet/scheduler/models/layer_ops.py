"""What the layers of a decoder compute with: plain torch, or fused kernels on a GPU. Chosen once for a whole model."""

from typing import NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F  # noqa: N812

from tercet.kernels.ops.activation import silu_and_mul
from tercet.kernels.ops.moe import ExpertWeights, fused_moe
from tercet.kernels.ops.quantised import QuantisedWeight, linear_quantised
from tercet.kernels.ops.rmsnorm import add_rmsnorm, rmsnorm
from tercet.kernels.ops.rope import apply_rope
from tercet.kernels.triton import missing_triton


class Batch(Protocol):
    """What a model needs of the step it is part of."""

    def attend(
        self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, window: int = 0
    ) -> torch.Tensor:
        """Cache k and v [tokens, kv_heads, head_dim]; the attention of q [tokens, heads, head_dim], of q's shape."""
        ...


class LayerCache(NamedTuple):
    """Where a layer's keys and values lie, and how new ones are written there: see `tercet.kernels.ops.store_kv`."""

    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor
    scales: tuple[float, float]


class CachedBatch(Batch, Protocol):
    """A step over a paged cache: see `ForwardBatch`."""

    def cache_of(self, layer_id: int) -> LayerCache:
        """A layer's cache."""
        ...

    def attend_cached(self, layer_id: int, q: torch.Tensor, *, scale: float, window: int = 0) -> torch.Tensor:
        """`attend`, where the new tokens' keys and values are in the cache already."""
        ...


Norms = tuple[torch.Tensor, torch.Tensor, float]
"""The weights of the norms of queries and keys, and their epsilon."""


class LayerOps(Protocol):
    """Tensors are [tokens, ...]; each operation is defined in `tercet.kernels.ops`."""

    def embedding(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor: ...  # noqa: D102
    def rmsnorm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...  # noqa: D102
    def add_rmsnorm(  # noqa: D102
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def linear(  # noqa: D102
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor: ...
    def gated_linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """silu(x @ gate.T) * (x @ up.T), of a weight that is both."""
        ...

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor: ...  # noqa: D102
    def linear_quantised(  # noqa: D102
        self, x: torch.Tensor, weight: QuantisedWeight, bias: torch.Tensor | None
    ) -> torch.Tensor: ...
    def fused_moe(  # noqa: D102
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        gate_up: ExpertWeights,
        down: ExpertWeights,
    ) -> torch.Tensor: ...

    def attend(
        self,
        batch: Batch,
        layer_id: int,
        heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        positions: torch.Tensor,
        table: torch.Tensor,
        norms: Norms | None,
        *,
        scale: float,
        window: int,
    ) -> torch.Tensor:
        """Norm and rotate queries and keys, cache keys and values, attend. `heads` are queries, keys and values."""
        ...


class TorchLayerOps:
    """On any device."""

    def embedding(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See `torch.nn.functional.embedding`."""
        return F.embedding(ids, weight)

    rmsnorm = staticmethod(rmsnorm)
    add_rmsnorm = staticmethod(add_rmsnorm)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See `torch.nn.functional.linear`."""
        return F.linear(x, weight, bias)

    def gated_linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See `LayerOps.gated_linear`."""
        return silu_and_mul(F.linear(x, weight, bias))

    silu_and_mul = staticmethod(silu_and_mul)
    linear_quantised = staticmethod(linear_quantised)
    fused_moe = staticmethod(fused_moe)

    def attend(
        self,
        batch: Batch,
        layer_id: int,
        heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        positions: torch.Tensor,
        table: torch.Tensor,
        norms: Norms | None,
        *,
        scale: float,
        window: int,
    ) -> torch.Tensor:
        """See `LayerOps.attend`."""
        q, k, v = heads
        if norms is not None:
            q, k = (rmsnorm(x, weight, norms[2]) for x, weight in zip((q, k), norms[:2], strict=True))
        q, k = apply_rope(q, k, positions, table)
        return batch.attend(layer_id, q, k, v, scale=scale, window=window)


class TritonLayerOps:
    """Fused kernels, for models that decode: `attend` takes a `CachedBatch`."""

    def __init__(self) -> None:
        from tercet.kernels.triton import activation, embedding, linear, moe, quantised, rmsnorm, rope

        self.embedding = embedding.embedding
        self.rmsnorm = rmsnorm.rmsnorm
        self.add_rmsnorm = rmsnorm.add_rmsnorm
        self.linear = linear.linear
        self.gated_linear = linear.gated_linear
        self.silu_and_mul = activation.silu_and_mul
        self.linear_quantised = quantised.linear_quantised
        self.fused_moe = moe.fused_moe
        self._rope_store = rope.rope_store

    def attend(
        self,
        batch: Batch,
        layer_id: int,
        heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        positions: torch.Tensor,
        table: torch.Tensor,
        norms: Norms | None,
        *,
        scale: float,
        window: int,
    ) -> torch.Tensor:
        """See `LayerOps.attend`."""
        cached = cast("CachedBatch", batch)
        keys, values, slots, scales = cached.cache_of(layer_id)
        weights, eps = (norms[:2], norms[2]) if norms is not None else (None, 0.0)
        q = self._rope_store(*heads, positions, table, keys, values, slots, norms=weights, eps=eps, scales=scales)
        return cached.attend_cached(layer_id, q, scale=scale, window=window)


TORCH = TorchLayerOps()


def layer_ops(device: torch.device) -> LayerOps:
    """The fastest that a device has: Triton's on a GPU, otherwise torch."""
    return TritonLayerOps() if device.type == "cuda" and not missing_triton(device) else TORCH


class OpsModule(torch.nn.Module):
    """A layer that computes with `ops`, which `use_ops` puts in place."""

    ops: LayerOps = TORCH


def use_ops(model: torch.nn.Module, ops: LayerOps) -> None:
    """Let every layer of a model compute with `ops`."""
    for module in model.modules():
        if isinstance(module, OpsModule):
            module.ops = ops
