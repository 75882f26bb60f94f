"""The operations of a decoder's layers: plain torch, or fused kernels on a GPU. The choice is made once per model."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F  # noqa: N812

from tercet.kernels.attention.api import AttentionParams, LatentQueries, NewTokens
from tercet.kernels.attention.delta_rule import delta_rule_of
from tercet.kernels.attention.latent import absorb_into, absorbed, values_of
from tercet.kernels.ops.activation import Gate, act_and_mul
from tercet.kernels.ops.embedding import ReplacedEmbeddings
from tercet.kernels.ops.lora import LoRARows, LoRAWeights, add_lora
from tercet.kernels.ops.moe import ExpertBiases, ExpertWeights, Routing, fused_moe, route
from tercet.kernels.ops.projection import Norm, Weight, project, project_normed, project_onto
from tercet.kernels.ops.recurrent import (
    DeltaInputs,
    GateName,
    ScanInputs,
    Segments,
    SelectiveInputs,
    causal_conv,
    gated_delta_rule,
    gated_rmsnorm,
    selective_scan,
    state_space_scan,
)
from tercet.kernels.ops.rmsnorm import add_rmsnorm, rmsnorm
from tercet.kernels.ops.rope import apply_rope
from tercet.kernels.triton import missing_triton
from tercet.scheduler.models.layers.shard import Cut


class Batch(Protocol):
    """The part of a step that a model needs."""

    @property
    def replaced(self) -> ReplacedEmbeddings | None:
        """Embeddings of tokens that are none of the vocabulary's."""
        ...

    def attend(
        self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Cache k and v [tokens, kv_heads, head_dim], attend with q [tokens, heads, head_dim], and return q's shape."""
        ...


class RecurrentBatch(Batch, Protocol):
    """A step over recurrent states. See `ForwardBatch`."""

    def states_of(self, layer_id: int) -> tuple[tuple[torch.Tensor, ...], Segments]:
        """Return the state tensors of a layer, and the segments of the step's tokens."""
        ...


class LayerCache(NamedTuple):
    """A layer's key and value caches, with the slots and scales of new ones: see `tercet.kernels.ops.store_kv`."""

    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor
    scales: tuple[float, float]


class CachedBatch(Batch, Protocol):
    """A step over a paged KV cache. See `ForwardBatch`."""

    def cache_of(self, layer_id: int) -> LayerCache:
        """Return a layer's cache."""
        ...

    def attend_cached(self, layer_id: int, q: torch.Tensor, params: AttentionParams) -> torch.Tensor:
        """Attend with the new tokens' keys and values already in the cache. See `attend`."""
        ...

    def rotates(self, layer_id: int) -> bool:
        """Return whether `attend_new` is available: for decodes, over a `RotatingBackend`."""
        ...

    def attend_new(self, layer_id: int, q: torch.Tensor, new: NewTokens, params: AttentionParams) -> torch.Tensor:
        """Attend with unrotated queries and new tokens. See `attend`."""
        ...

    def expands(self, layer_id: int) -> bool:
        """Return whether `attend_expanded` is available: for long prompts, over an `ExpandingBackend`."""
        ...

    def attend_expanded(self, layer_id: int, queries: LatentQueries, params: AttentionParams) -> torch.Tensor:
        """Attend with rotated queries, and the new tokens' vectors already in the cache."""
        ...


Norms = tuple[torch.Tensor, torch.Tensor, float]
"""The weights of the norms of queries and keys, and their epsilon."""


class NewLatents(NamedTuple):
    """The new latents of a step, before norm and rotation."""

    vectors: torch.Tensor  # [tokens, rank + rope_dim]: latents, and the rotated part of their keys
    norm: Norm
    """The norm of the latents."""
    positions: torch.Tensor
    table: torch.Tensor


class LayerOps(Protocol):
    """The interface of a layer's operations on tensors [tokens, ...]; `tercet.kernels.ops` defines each of them."""

    def embedding(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor: ...
    def rmsnorm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...
    def add_rmsnorm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def project(
        self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, *, gate: Gate | None = None
    ) -> torch.Tensor: ...
    def project_normed(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm: Norm,
        weight: Weight,
        bias: torch.Tensor | None,
        *,
        gate: Gate | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def project_onto(
        self, x: torch.Tensor, residual: torch.Tensor, weight: Weight, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...
    def project_adapted(
        self,
        x: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None,
        adapters: LoRAWeights,
        rows: LoRARows,
        *,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Return `project` of the normalized x, plus `add_lora` and the residual; None where that is not faster."""
        ...

    def act_and_mul(self, x: torch.Tensor, gate: Gate) -> torch.Tensor: ...
    def add_lora(self, out: torch.Tensor, x: torch.Tensor, weights: LoRAWeights, rows: LoRARows) -> None: ...
    def route(
        self, router_logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def fused_moe(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        gate_up: ExpertWeights,
        down: ExpertWeights,
        *,
        gate: Gate | None = "silu",
        biases: ExpertBiases | None = None,
    ) -> torch.Tensor: ...

    def attend(
        self,
        batch: Batch,
        layer_id: int,
        heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        positions: torch.Tensor,
        table: torch.Tensor,
        norms: Norms | None,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Normalize and rotate queries and keys, cache keys and values, attend. `heads` are queries, keys and
        values.
        """
        ...

    def attend_latents(
        self, batch: Batch, layer_id: int, queries: LatentQueries, new: NewLatents, params: AttentionParams
    ) -> torch.Tensor:
        """Rotate queries, normalize latents, rotate their keys, cache both, attend: [tokens, heads, value_dim]."""
        ...

    def causal_conv(
        self,
        x: torch.Tensor,
        states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        segments: Segments,
        *,
        silu: bool = False,
    ) -> torch.Tensor: ...
    def gated_delta_rule(self, inputs: DeltaInputs, states: torch.Tensor, segments: Segments) -> torch.Tensor: ...
    def gated_rmsnorm(
        self, x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float, act: GateName
    ) -> torch.Tensor: ...
    def state_space_scan(self, inputs: ScanInputs, states: torch.Tensor, segments: Segments) -> torch.Tensor: ...
    def selective_scan(self, inputs: SelectiveInputs, states: torch.Tensor, segments: Segments) -> torch.Tensor: ...


class TorchLayerOps:
    """Operations in plain torch, for any device."""

    def embedding(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See `torch.nn.functional.embedding`."""
        return F.embedding(ids, weight)

    rmsnorm = staticmethod(rmsnorm)
    add_rmsnorm = staticmethod(add_rmsnorm)
    apply_rope = staticmethod(apply_rope)

    project = staticmethod(project)
    project_normed = staticmethod(project_normed)
    project_onto = staticmethod(project_onto)
    act_and_mul = staticmethod(act_and_mul)
    add_lora = staticmethod(add_lora)
    route = staticmethod(route)
    fused_moe = staticmethod(fused_moe)
    causal_conv = staticmethod(causal_conv)
    gated_delta_rule = staticmethod(gated_delta_rule)
    state_space_scan = staticmethod(state_space_scan)
    selective_scan = staticmethod(selective_scan)

    def gated_rmsnorm(
        self, x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float, act: GateName
    ) -> torch.Tensor:
        """See `tercet.kernels.ops.recurrent.gated_rmsnorm`."""
        return gated_rmsnorm(x, weight, gate, eps, act, norm=self.rmsnorm)

    def project_adapted(self, *_: object, **__: object) -> None:
        """See `LayerOps.project_adapted`: here each part is an operation of its own."""

    def attend(
        self,
        batch: Batch,
        layer_id: int,
        heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        positions: torch.Tensor,
        table: torch.Tensor,
        norms: Norms | None,
        params: AttentionParams,
    ) -> torch.Tensor:
        """See `LayerOps.attend`."""
        q, k, v = heads
        if norms is not None:
            q, k = (self.rmsnorm(x, weight, norms[2]) for x, weight in zip((q, k), norms[:2], strict=True))
        q, k = self.apply_rope(q, k, positions, table)
        return batch.attend(layer_id, q, k, v, params)

    def attend_latents(
        self, batch: Batch, layer_id: int, queries: LatentQueries, new: NewLatents, params: AttentionParams
    ) -> torch.Tensor:
        """See `LayerOps.attend_latents`."""
        rank = queries.w_uk.shape[2]
        q_pe, key = apply_rope(queries.q_pe, new.vectors[:, None, rank:], new.positions, new.table)
        vectors = torch.cat([rmsnorm(new.vectors[:, None, :rank], *new.norm), key], 2)
        q = absorbed(queries._replace(q_pe=q_pe))
        return values_of(batch.attend(layer_id, q, vectors, vectors[..., :rank], params), queries.w_uv)


class TritonLayerOps:
    """Fused kernels for models that decode: `attend` takes a `CachedBatch`."""

    def __init__(self) -> None:
        from tercet.kernels.triton import activation, embedding, rmsnorm
        from tercet.kernels.triton.attention import latent_rope, rope
        from tercet.kernels.triton.linear import lora, projection
        from tercet.kernels.triton.moe import moe, route
        from tercet.kernels.triton.recurrent import causal_conv, delta_rule, scan, selective

        self.embedding = embedding.embedding
        self.rmsnorm = rmsnorm.rmsnorm
        self.add_rmsnorm = rmsnorm.add_rmsnorm
        self.project = projection.project
        self.project_normed = projection.project_normed
        self.project_onto = projection.project_onto
        self.project_adapted = projection.project_adapted
        self.act_and_mul = activation.act_and_mul
        self.add_lora = lora.add_lora
        self.route = route.route
        self.fused_moe = moe.fused_moe
        self.causal_conv = causal_conv.causal_conv
        self.gated_delta_rule = delta_rule.gated_delta_rule
        self.gated_rmsnorm = partial(gated_rmsnorm, norm=rmsnorm.rmsnorm)
        self.state_space_scan = scan.state_space_scan
        self.selective_scan = selective.selective_scan
        self._rope_store = rope.rope_store
        self._latent_rope_store = latent_rope.latent_rope_store

    def attend(
        self,
        batch: Batch,
        layer_id: int,
        heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        positions: torch.Tensor,
        table: torch.Tensor,
        norms: Norms | None,
        params: AttentionParams,
    ) -> torch.Tensor:
        """See `LayerOps.attend`."""
        q, k, v = heads
        if k.shape[2] != v.shape[2]:
            return TORCH.attend(batch, layer_id, heads, positions, table, norms, params)
        cached = cast("CachedBatch", batch)
        keys, values, slots, scales = cached.cache_of(layer_id)
        weights, eps = (norms[:2], norms[2]) if norms is not None else (None, 0.0)
        if cached.rotates(layer_id):
            new = NewTokens(k=k, v=v, positions=positions, table=table, norms=weights, eps=eps, scales=scales)
            return cached.attend_new(layer_id, q, new, params)
        q = self._rope_store(q, k, v, positions, table, keys, values, slots, norms=weights, eps=eps, scales=scales)
        return cached.attend_cached(layer_id, q, params)

    def attend_latents(
        self, batch: Batch, layer_id: int, queries: LatentQueries, new: NewLatents, params: AttentionParams
    ) -> torch.Tensor:
        """See `LayerOps.attend_latents`."""
        cached = cast("CachedBatch", batch)
        q_nope, q_pe, w_uk, w_uv = queries
        cache, _, slots, _ = cached.cache_of(layer_id)
        q = q_nope.new_empty(*q_nope.shape[:2], new.vectors.shape[1])
        self._latent_rope_store(q, q_pe, *new, cache, slots)
        if cached.expands(layer_id):
            return cached.attend_expanded(layer_id, queries._replace(q_pe=q[..., w_uk.shape[2] :]), params)
        absorb_into(q, q_nope, w_uk)
        return values_of(cached.attend_cached(layer_id, q, params), w_uv)


TORCH = TorchLayerOps()


def layer_ops(device: torch.device) -> LayerOps:
    """Return the fastest operations for a device: Triton's and FlashInfer's on a GPU, otherwise torch's."""
    if device.type != "cuda" or missing_triton(device):
        return TORCH
    fused = TritonLayerOps()
    fused.gated_delta_rule = delta_rule_of(device, fused.gated_delta_rule)
    return fused


class OpsModule(torch.nn.Module):
    """A layer that computes with `ops`, which `set_ops` sets."""

    ops: LayerOps = TORCH
    cuts: Mapping[str, Cut] = MappingProxyType({})
    """The stored part of parameters that this rank holds, by name; parameters without an entry are held whole."""

    def process_weights_after_loading(self) -> None:
        """Convert loaded weights to the form that `forward` uses."""


def set_ops(model: torch.nn.Module, ops: LayerOps) -> None:
    """Make all layers of a model compute with `ops`, and cache their submodules."""
    for module in model.modules():
        if isinstance(module, OpsModule):
            module.ops = ops
        cache_submodules(module)


def cache_submodules(module: torch.nn.Module) -> None:
    """Copy submodules and parameters into `__dict__`, so that lookups skip `nn.Module.__getattr__`.

    If one is set again, torch removes the copy; one that is deleted, or set to None, keeps its copy.
    """
    vars(module).update(module._modules)
    vars(module).update(module._parameters)
