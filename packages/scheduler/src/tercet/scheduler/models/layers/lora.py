"""Adapters of a model of ours: where their weights lie, and layers that add what these give.

Attention and plain MLPs have them; experts, routers, norms, embeddings and heads do not.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tercet.kernels.native_decoder import LayerAdapters
from tercet.kernels.ops.activation import Gate
from tercet.kernels.ops.lora import LoRARows, LoRAWeights
from tercet.kernels.ops.projection import Norm, Weight
from tercet.kernels.pinned import pinned_empty
from tercet.scheduler.models.layers.decoder import CausalLM, DecoderLayer
from tercet.scheduler.models.layers.layer_ops import LayerOps, TorchLayerOps
from tercet.scheduler.models.layers.layers import Attention, GatedMLP
from tercet.scheduler.models.layers.linear import FusedLinear, Linear
from tercet.scheduler.models.layers.shard import Cut


class AdaptedBatch(Protocol):
    """What adapters need of a step: see `ForwardBatch`."""

    @property
    def lora(self) -> LoRARows | None:
        """Which tokens have an adapter."""
        ...


@dataclass(frozen=True, eq=False)
class Target:
    """A linear layer that an adapter may change, as files name it and as it is held here."""

    inputs: Cut
    parts: Mapping[str, Cut]
    """The name of each projection that it is made of, and what is held of its outputs."""
    whole: str
    """The name under which files may have all of these as one."""
    order: torch.Tensor | None
    """As in `Linear`."""

    @classmethod
    def of(cls, path: str, linear: Linear) -> "Target":
        """The layer at a path."""
        inputs = linear.cuts.get("weight", Cut.all(linear.weight.shape[1]))
        if not isinstance(linear, FusedLinear):
            return cls(inputs, {path: Cut.all(linear.weight.shape[0])}, path, linear.order)
        parent = path.rpartition(".")[0]
        return cls(inputs, {f"{parent}.{name}": cut for name, cut in linear.parts.items()}, path, linear.order)

    @property
    def most_numbers(self) -> int:
        """Weights that an adapter of rank 1 stores for it."""
        return sum(self.inputs.whole + part.whole for part in self.parts.values())


@dataclass(frozen=True, eq=False)
class LayerAdapter:
    """What an adapter adds to one layer, as far as it is held here: see `LoRAWeights`."""

    a: torch.Tensor  # [parts, rank, inputs]
    b: torch.Tensor  # [rank, outputs]


def linears_of(model: CausalLM) -> Iterator[tuple[str, Linear]]:
    """Every layer that an adapter may change, and its path. Call it before its weights are taken away."""
    for number, layer in enumerate(model.model.layers):
        assert isinstance(layer, DecoderLayer)
        assert isinstance(layer.self_attn, Attention)
        prefix = f"model.layers.{number}"
        yield f"{prefix}.self_attn.qkv_proj", layer.self_attn.qkv_proj
        yield f"{prefix}.self_attn.o_proj", layer.self_attn.o_proj
        if isinstance(layer.mlp, GatedMLP):
            yield f"{prefix}.mlp.gate_up_proj", layer.mlp.gate_up_proj
            yield f"{prefix}.mlp.down_proj", layer.mlp.down_proj


class LoRABank:
    """The weights of the adapters at all places, and which tokens of the step in hand have them."""

    def __init__(self, model: CausalLM, places: int, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        """Memory for `places` adapters of a rank up to `rank`; on a CPU the system gives it as they come."""
        self._linears = dict(linears_of(model))
        self.targets = {path: Target.of(path, linear) for path, linear in self._linears.items()}
        self.weights = {path: _weights(target, places, rank, dtype, device) for path, target in self.targets.items()}
        self.ranks = [0] * places
        self.rows: LoRARows | None = None
        """Of the step that is computed; set before every forward."""

    @property
    def bytes(self) -> int:
        """Memory of all places."""
        return sum(weights.a.nbytes + weights.b.nbytes for weights in self.weights.values())

    def install(self, place: int, layers: Mapping[str, LayerAdapter], rank: int) -> None:
        """Put an adapter, by the paths of its layers, in place of what was there."""
        for path, weights in self.weights.items():
            a, b = weights.a[place].view(len(weights.parts), weights.rank, -1), weights.b[place]
            used = max(rank, self.ranks[place])
            a[:, :used], b[:used] = 0, 0
            if layer := layers.get(path):
                own = layer.b.shape[0]
                _bring(a[:, :own], layer.a)
                _bring(b[:own], layer.b)
        self.ranks[place] = rank

    def of_layer(self, number: int) -> LayerAdapters:
        """The weights of one layer, as native kernels take them."""
        names = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
        return LayerAdapters(*(self.weights.get(f"model.layers.{number}.{name}") for name in names))

    def attach(self, model: CausalLM) -> None:
        """Let the layers of a model add what adapters give, in whatever way they compute."""
        for path, linear in self._linears.items():
            linear.ops = AdaptedProjection(linear.ops, self.weights[path], self)
        model.register_forward_pre_hook(lambda _, inputs: self._begin(inputs[2]))

    def _begin(self, batch: AdaptedBatch) -> None:
        self.rows = batch.lora


def _bring(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy numbers from the host, which does not wait for a device that has a step to finish first."""
    if target.is_cuda:
        source = pinned_empty(source.shape, target.dtype, target.device).copy_(source)
    target.copy_(source, non_blocking=True)


class AdaptedProjection(TorchLayerOps):
    """What a linear layer computes with that may have adapters. Without any in a step it is as if there were none."""

    def __init__(self, plain: LayerOps, weights: LoRAWeights, bank: LoRABank) -> None:
        self._plain = plain
        self._weights = weights
        self._bank = bank

    def project(
        self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, *, gate: Gate | None = None
    ) -> torch.Tensor:
        """See `tercet.kernels.ops.projection`, and for what follows."""
        rows = self._bank.rows
        if rows is None:
            return self._plain.project(x, weight, bias, gate=gate)
        out = self._plain.project(x, weight, bias)
        self._plain.add_lora(out, x, self._weights, rows)
        return out if gate is None else self._plain.act_and_mul(out, gate)

    def project_normed(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm: Norm,
        weight: Weight,
        bias: torch.Tensor | None = None,
        *,
        gate: Gate | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """After a norm."""
        if self._bank.rows is None:
            return self._plain.project_normed(x, residual, norm, weight, bias, gate=gate)
        if residual is None:
            normed, total = self._plain.rmsnorm(x, *norm), x
        else:
            normed, total = self._plain.add_rmsnorm(x, residual, *norm)
        return self.project(normed, weight, bias, gate=gate), total

    def project_onto(
        self, x: torch.Tensor, residual: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Before a sum."""
        if self._bank.rows is None:
            return self._plain.project_onto(x, residual, weight, bias)
        return self.project(x, weight, bias), residual


def _weights(target: Target, places: int, rank: int, dtype: torch.dtype, device: torch.device) -> LoRAWeights:
    outputs: Sequence[int] = [part.held for part in target.parts.values()]
    return LoRAWeights(
        torch.zeros(places, len(outputs) * rank, target.inputs.held, dtype=dtype, device=device),
        torch.zeros(places, rank, sum(outputs), dtype=dtype, device=device),
        tuple(outputs),
    )
