"""LoRA adapters of our models: their weights, and layers that add their outputs.

Attention, recurrent layers and plain MLPs can have adapters; latent attention, experts, routers, norms, embeddings and
heads cannot.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Protocol

import torch

from tercet.kernels.native_decoder import LayerAdapters
from tercet.kernels.ops.activation import Gate
from tercet.kernels.ops.lora import LoRARows, LoRAWeights
from tercet.kernels.ops.projection import Norm, Weight
from tercet.kernels.pinned import pinned_empty
from tercet.scheduler.models.layers.decoder import CausalLM
from tercet.scheduler.models.layers.layer_ops import LayerOps, TorchLayerOps
from tercet.scheduler.models.layers.layers import Attention, GatedMLP, SquaredReLUMLP
from tercet.scheduler.models.layers.linear import FusedLinear, Linear
from tercet.scheduler.models.layers.recurrent import RecurrentLayer
from tercet.scheduler.models.layers.shard import Cut


class AdaptedBatch(Protocol):
    """The part of a step that adapters need. See `ForwardBatch`."""

    @property
    def lora(self) -> LoRARows | None:
        """The tokens that have an adapter."""
        ...


@dataclass(frozen=True, eq=False)
class Target:
    """A linear layer that an adapter may change, with its names in files and this rank's shard."""

    inputs: Cut
    parts: Mapping[str, Cut]
    """The name of each projection in the layer, and its held outputs."""
    whole: str
    """The name under which files may store all projections as one."""
    order: torch.Tensor | None
    """See `Linear.order`."""

    @classmethod
    def of(cls, path: str, linear: Linear) -> "Target":
        """Create the target of a layer at a path."""
        inputs = linear.cuts.get("weight", Cut.all(linear.weight.shape[1]))
        if not isinstance(linear, FusedLinear):
            return cls(inputs, {path: Cut.all(linear.weight.shape[0])}, path, linear.order)
        parent = path.rpartition(".")[0]
        return cls(inputs, {f"{parent}.{name}": cut for name, cut in linear.parts.items()}, path, linear.order)

    @cached_property
    def pieces(self) -> list[tuple[int, int]]:
        """The index of a part, and a number of outputs of it, in the order of outputs. `order` may divide parts."""
        owners = [index for index, part in enumerate(self.parts.values()) for _ in range(part.held)]
        if self.order is not None:
            owners = [owners[row] for row in self.order.tolist()]
        return [(owner, len(list(rows))) for owner, rows in groupby(owners)]

    @property
    def rank_one_size(self) -> int:
        """Number of weights of an adapter of rank 1 for this layer."""
        return sum(self.inputs.whole + part.whole for part in self.parts.values())


@dataclass(frozen=True, eq=False)
class LayerAdapter:
    """An adapter's weights for one layer, restricted to this rank's shard. See `LoRAWeights`."""

    a: torch.Tensor  # [pieces, rank, inputs]
    b: torch.Tensor  # [rank, outputs]


def linears_of(model: CausalLM) -> Iterator[tuple[str, Linear]]:
    """Yield every layer that an adapter may change, with its path. Call it before the weights are taken."""
    for number, layer in enumerate(model.model.layers):
        for name, module in layer.named_children():
            if isinstance(module, Attention | RecurrentLayer | GatedMLP | SquaredReLUMLP):
                for part, linear in module.named_children():
                    if isinstance(linear, Linear):
                        yield f"model.layers.{number}.{name}.{part}", linear


class LoRABank:
    """The weights of the adapters in all adapter slots, and the current step's tokens that use them."""

    def __init__(
        self,
        model: CausalLM,
        places: int,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        all_stages: CausalLM | None = None,
    ) -> None:
        """Allocate `places` adapter slots of a rank up to `rank`; a CPU's memory is committed on first use.

        If the model is a pipeline stage, `all_stages` has the layers of all of them.
        """
        self.architecture = model.config.architecture
        self._linears = dict(linears_of(model))
        self.targets = {path: Target.of(path, linear) for path, linear in linears_of(all_stages or model)}
        """Targets of all stages, so that each refuses an adapter that any cannot run."""
        self.weights = {path: _weights(self.targets[path], places, rank, dtype, device) for path in self._linears}
        self.ranks = [0] * places
        self.rows: LoRARows | None = None
        """The rows of the current step; set before every forward."""

    @property
    def bytes(self) -> int:
        """Memory of all adapter slots in bytes."""
        return sum(weights.a.nbytes + weights.b.nbytes for weights in self.weights.values())

    def install(self, place: int, layers: Mapping[str, LayerAdapter], rank: int) -> None:
        """Install an adapter, by the paths of its layers, in a slot, replacing the previous one."""
        for path, weights in self.weights.items():
            a, b = weights.a[place].view(len(weights.parts), weights.rank, -1), weights.b[place]
            used = max(rank, self.ranks[place])
            a[:, :used], b[:used] = 0, 0
            if layer := layers.get(path):
                own = layer.b.shape[0]
                _copy_async(a[:, :own], layer.a)
                _copy_async(b[:own], layer.b)
        self.ranks[place] = rank

    def of_layer(self, number: int) -> LayerAdapters:
        """Return the weights of one layer in the format of native kernels."""
        names = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
        return LayerAdapters(*(self.weights.get(f"model.layers.{number}.{name}") for name in names))

    def attach(self, model: CausalLM) -> None:
        """Make the layers of a model add the outputs of adapters to those of their current operations."""
        for path, linear in self._linears.items():
            linear.ops = AdaptedProjection(linear.ops, self.weights[path], self)
        model.register_forward_pre_hook(lambda _, inputs: self._begin(inputs[2]))

    def _begin(self, batch: AdaptedBatch) -> None:
        self.rows = batch.lora


def _copy_async(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy from the host without waiting for the device's current step."""
    if target.is_cuda:
        source = pinned_empty(source.shape, target.dtype, target.device).copy_(source)
    target.copy_(source, non_blocking=True)


class AdaptedProjection(TorchLayerOps):
    """The operations of a linear layer with adapters. In steps without any, it calls the plain operations."""

    def __init__(self, plain: LayerOps, weights: LoRAWeights, bank: LoRABank) -> None:
        self._plain = plain
        self._weights = weights
        self._bank = bank

    def project(
        self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, *, gate: Gate | None = None
    ) -> torch.Tensor:
        """See `tercet.kernels.ops.projection`; this holds for the following methods, too."""
        rows = self._bank.rows
        if rows is None:
            return self._plain.project(x, weight, bias, gate=gate)
        out = self._plain.project_adapted(x, weight, bias, self._weights, rows)
        if out is None:
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
        """Normalize, then project."""
        rows = self._bank.rows
        if rows is None:
            return self._plain.project_normed(x, residual, norm, weight, bias, gate=gate)
        if residual is None:
            out = self._plain.project_adapted(x, weight, bias, self._weights, rows, norm=norm)
            if out is not None:
                return out if gate is None else self._plain.act_and_mul(out, gate), x
            normed, total = self._plain.rmsnorm(x, *norm), x
        else:
            normed, total = self._plain.add_rmsnorm(x, residual, *norm)
        return self.project(normed, weight, bias, gate=gate), total

    def project_onto(
        self, x: torch.Tensor, residual: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Project; the residual may be added."""
        rows = self._bank.rows
        if rows is None:
            return self._plain.project_onto(x, residual, weight, bias)
        total = self._plain.project_adapted(x, weight, bias, self._weights, rows, residual=residual)
        if total is not None:
            return total, None
        return self.project(x, weight, bias), residual


def _weights(target: Target, places: int, rank: int, dtype: torch.dtype, device: torch.device) -> LoRAWeights:
    outputs = [count for _, count in target.pieces]
    return LoRAWeights(
        torch.zeros(places, len(outputs) * rank, target.inputs.held, dtype=dtype, device=device),
        torch.zeros(places, rank, sum(outputs), dtype=dtype, device=device),
        tuple(outputs),
    )
