"""Linear layers of models that run on torch, on native kernels: their weights packed, and float32 between."""

import torch
from torch import nn

from tercet.kernels.memory import give_back
from tercet.kernels.native.library import Library
from tercet.kernels.native.linear import PackedLinear, Quantization, pack_linear, pack_linears
from tercet.kernels.ops.activation import Gate, act_and_mul
from tercet.kernels.ops.moe import ExpertBiases, ExpertWeights, by_expert
from tercet.kernels.ops.projection import Norm, Weight, normed_sum
from tercet.scheduler.models.layers.decoder import CausalLM
from tercet.scheduler.models.layers.layer_ops import TorchLayerOps
from tercet.scheduler.models.layers.linear import Linear
from tercet.scheduler.models.layers.moe import ExpertLinear, Experts, MixtureOfExperts


def unread(dtype: torch.dtype, what: str) -> str:
    """Why native kernels do not read `what` is of a dtype; empty where they do."""
    if dtype in (torch.float32, torch.bfloat16):
        return ""
    return f"native kernels do not read {what} in {str(dtype).removeprefix('torch.')}"


class NativeLinear(nn.Module):
    """Takes the place of a `torch.nn.Linear`. `weight` is empty: there for whoever asks for its dtype."""

    def __init__(self, packed: PackedLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
        self._packed = packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., outputs], of x's dtype."""
        return _product(self._packed, x)


class NativeProjection(TorchLayerOps):
    """What a linear layer of ours computes with whose weight and bias are packed: those that it gives are not read.

    A head stays in float32, in which logits are sampled from natively.
    """

    def __init__(self, packed: PackedLinear, *, head: bool = False) -> None:
        self._packed = packed
        self._head = head

    def project(
        self,
        x: torch.Tensor,
        weight: Weight,  # noqa: ARG002
        bias: torch.Tensor | None = None,  # noqa: ARG002
        *,
        gate: Gate | None = None,
    ) -> torch.Tensor:
        """See `tercet.kernels.ops.projection`, and for what follows."""
        out = self._packed(x.float()) if self._head else _product(self._packed, x)
        return out if gate is None else act_and_mul(out, gate)

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
        normed, total = normed_sum(x, residual, norm)
        return self.project(normed, weight, bias, gate=gate), total

    def project_onto(
        self, x: torch.Tensor, residual: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Before a sum."""
        return self.project(x, weight, bias), residual


class NativeExperts(TorchLayerOps):
    """What a mixture of experts computes with whose weights and biases are packed: those that it gives are not read."""

    def __init__(self, library: Library, experts: Experts, quantization: Quantization) -> None:
        """Takes the weights away."""
        self._gate_up, self._down = (
            pack_experts(library, linear, quantization) for linear in (experts.gate_up_proj, experts.down_proj)
        )

    def fused_moe(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        gate_up: ExpertWeights,  # noqa: ARG002
        down: ExpertWeights,  # noqa: ARG002
        *,
        gate: Gate = "silu",
        biases: ExpertBiases | None = None,  # noqa: ARG002
    ) -> torch.Tensor:
        """See `tercet.kernels.ops.moe`; float32 from an expert's inputs to its outputs."""

        def one(expert: int, rows: torch.Tensor) -> torch.Tensor:
            return self._down[expert](act_and_mul(self._gate_up[expert](rows.float()), gate))

        return by_expert(x, weights, experts, len(self._down), one)


def pack_experts(
    library: Library, experts: ExpertLinear, quantization: Quantization, *, interleave: bool = False
) -> list[PackedLinear]:
    """Pack one expert's weight after another, so that none but one is there twice; leave the module without."""
    biases = [None] * len(experts.weight) if experts.bias is None else experts.bias.data
    return pack_linears(library, experts.take(), list(biases), quantization=quantization, interleave=interleave)


def _product(packed: PackedLinear, x: torch.Tensor) -> torch.Tensor:
    """[..., inputs] -> [..., outputs], of x's dtype."""
    out = packed(x.reshape(-1, x.shape[-1]).float())
    return out.view(*x.shape[:-1], -1).to(x.dtype)


def use_native_projections(model: CausalLM, library: Library, quantization: Quantization = "none") -> bool:
    """Let the linear layers of a model of ours compute with native kernels; whether little is left to torch.

    Its head and experts in full are among them, experts in few bits are not. Routers are never rounded: which experts
    a token has would change. Weights are taken away one by one, so that memory never holds all of them twice. The
    embedding stays: where it is the head, it is there twice. What is not packable stays, for torch.
    """
    little = True
    head = model.model.embed_tokens if model.lm_head is None else model.lm_head
    model.ops = NativeProjection(pack_linear(library, head.weight.data, quantization=quantization), head=True)
    mixtures = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    routers = {id(module) for mixture in mixtures for module in (mixture.gate, mixture.shared_expert_gate)}
    for module in model.modules():
        if module is model.lm_head:
            head.take()
        elif isinstance(module, Linear) and module.packable:
            bias = None if module.bias is None else module.bias.data
            rounded: Quantization = "none" if id(module) in routers else quantization
            module.ops = NativeProjection(pack_linear(library, module.take(), bias, quantization=rounded))
    for mixture in mixtures:
        if mixture.experts.down_proj.quantised is None:
            mixture.ops = NativeExperts(library, mixture.experts, quantization)
        else:
            little = False
    give_back()  # what the weights took as they were read
    return little


def use_native_linears(model: nn.Module, library: Library, quantization: Quantization = "none") -> int:
    """Put native layers in the place of a model's linear ones, and say how many.

    Weights are taken away one by one, so that memory never holds all of them twice; those that others read too stay.
    """
    shared = _shared(model)
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear:  # a subclass may compute something else
                continue
            bias = None if child.bias is None else child.bias.data
            packed = pack_linear(library, child.weight.data, bias, quantization=quantization)
            setattr(parent, name, NativeLinear(packed, child.weight.dtype))
            if id(child.weight) not in shared:
                child.weight.data = torch.empty(0)
            count += 1
    give_back()  # what the weights took as they were read
    return count


def _shared(model: nn.Module) -> set[int]:
    """The ids of parameters that several modules have, such as an embedding that is the head, too."""
    seen: set[int] = set()
    twice: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            (twice if id(parameter) in seen else seen).add(id(parameter))
    return twice
