"""Native kernels for the linear layers of models that otherwise run on torch: packed weights, float32 activations."""

import torch
from torch import nn

from tercet.kernels.memory import give_back
from tercet.kernels.native.library import Library
from tercet.kernels.native.linear import PackedLinear, Quantization, pack_linear, pack_linears
from tercet.kernels.native.ops import NativeOps
from tercet.kernels.native.recurrent import NativeConvolution, NativeRecurrence
from tercet.kernels.ops.activation import Gate, act_and_mul, squared_relu
from tercet.kernels.ops.moe import ExpertBiases, ExpertWeights, by_expert
from tercet.kernels.ops.projection import Norm, Weight
from tercet.kernels.ops.recurrent import Segments
from tercet.scheduler.models.layers.decoder import CausalLM
from tercet.scheduler.models.layers.layer_ops import TorchLayerOps
from tercet.scheduler.models.layers.layers import Attention
from tercet.scheduler.models.layers.linear import Linear
from tercet.scheduler.models.layers.moe import ExpertLinear, Experts, MixtureOfExperts
from tercet.scheduler.models.layers.norms import RMSNorm
from tercet.scheduler.models.layers.recurrent import CausalConv, RecurrentLayer


def unsupported_dtype(dtype: torch.dtype, what: str) -> str:
    """Return the reason why native kernels do not read a dtype; empty if they do. `what` names the data."""
    if dtype in (torch.float32, torch.bfloat16):
        return ""
    return f"native kernels do not read {what} in {str(dtype).removeprefix('torch.')}"


class NativeLinear(nn.Module):
    """A replacement of a `torch.nn.Linear`. `weight` is empty: it only tells the dtype."""

    def __init__(self, packed: PackedLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
        self._packed = packed
        self.out_features = packed.outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., outputs], in x's dtype, for x [..., inputs]."""
        return _product(self._packed, x)


class NativeLayerOps(TorchLayerOps):
    """Operations that need no packed weights: norms, activations and rotation."""

    def __init__(self, library: Library) -> None:
        native = NativeOps(library)
        self.rmsnorm = native.rmsnorm
        self.add_rmsnorm = native.add_rmsnorm
        self.apply_rope = native.apply_rope
        self._silu_and_mul = native.silu_and_mul

    def act_and_mul(self, x: torch.Tensor, gate: Gate) -> torch.Tensor:
        """See `tercet.kernels.ops.activation.act_and_mul`."""
        return self._silu_and_mul(x) if gate == "silu" else act_and_mul(x, gate)


class FloatEmbedding(TorchLayerOps):
    """The operations of an embedding whose model keeps activations in float32 between native operations."""

    def embedding(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the embeddings in float32."""
        return super().embedding(ids, weight).float()


class NativeProjection(NativeLayerOps):
    """The operations of one of our linear layers with packed weight and bias; the weight arguments are ignored.

    A head stays in float32, which native sampling reads.
    """

    def __init__(self, packed: PackedLinear, *, head: bool = False) -> None:
        super().__init__(packed.library)
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
        """See `tercet.kernels.ops.projection`; this holds for the following methods, too."""
        out = self._packed(x.float()) if self._head else _product(self._packed, x)
        return out if gate is None else self.act_and_mul(out, gate)

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
        normed, total = (self.rmsnorm(x, *norm), x) if residual is None else self.add_rmsnorm(x, residual, *norm)
        return self.project(normed, weight, bias, gate=gate), total

    def project_onto(
        self, x: torch.Tensor, residual: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Project; the caller adds the result to the residual."""
        return self.project(x, weight, bias), residual


class NativeExperts(TorchLayerOps):
    """The operations of a mixture of experts with packed weights and biases; the weight arguments are ignored."""

    def __init__(self, library: Library, experts: Experts, quantization: Quantization) -> None:
        """Pack the experts' weights and remove them from the modules."""
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
        gate: Gate | None = "silu",
        biases: ExpertBiases | None = None,  # noqa: ARG002
    ) -> torch.Tensor:
        """See `tercet.kernels.ops.moe`. Activations inside an expert are float32."""

        def one(expert: int, rows: torch.Tensor) -> torch.Tensor:
            projected = self._gate_up[expert](rows.float())
            return self._down[expert](squared_relu(projected) if gate is None else act_and_mul(projected, gate))

        return by_expert(x, weights, experts, len(self._down), one)


class NativeRecurrentOps(NativeRecurrence, TorchLayerOps):
    """The operations of a recurrent layer, whose projections and convolution have operations of their own."""


class NativeConvolutionOps(TorchLayerOps):
    """The operations of a convolution with repacked weight and bias; the weight arguments are ignored."""

    def __init__(self, library: Library, conv: CausalConv) -> None:
        self._convolve = NativeConvolution(library, conv.weight[:, 0], conv.bias)

    def causal_conv(
        self,
        x: torch.Tensor,
        states: torch.Tensor,
        weight: torch.Tensor,  # noqa: ARG002
        bias: torch.Tensor | None,  # noqa: ARG002
        segments: Segments,
        *,
        silu: bool = False,
    ) -> torch.Tensor:
        """See `tercet.kernels.ops.recurrent.causal_conv`."""
        return self._convolve(x, states, segments, silu=silu)


def pack_experts(
    library: Library, experts: ExpertLinear, quantization: Quantization, *, interleave: bool = False
) -> list[PackedLinear]:
    """Pack the experts' weights one at a time, so that memory holds one twice at most; remove them from the module."""
    biases = [None] * len(experts.weight) if experts.bias is None else experts.bias.data
    return pack_linears(library, experts.take(), list(biases), quantization=quantization, interleave=interleave)


def _product(packed: PackedLinear, x: torch.Tensor) -> torch.Tensor:
    """Return [..., outputs], in x's dtype, for x [..., inputs]."""
    if x.dim() == 2:
        return packed(x.float()).to(x.dtype)
    out = packed(x.reshape(-1, x.shape[-1]).float())
    return out.view(*x.shape[:-1], -1).to(x.dtype)


def use_native_projections(model: CausalLM, library: Library, quantization: Quantization = "none") -> bool:
    """Make the linear layers of one of our models use native kernels. Return whether torch has little left to compute.

    These include the head and unquantized experts, but not quantized experts. Routers are never quantized, because this
    would change the choice of experts, and neither are the rates of recurrent states.
    Weights are moved one by one, so that memory never holds all of them twice. The embedding stays: if it is also the
    head, memory holds it twice. Layers that cannot be packed stay on torch.
    """
    little = True
    if model.shard.stage.is_last:
        model.ops = NativeProjection(pack_linear(library, model.head.weight.data, quantization=quantization), head=True)
    mixtures = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    routers = {id(module) for mixture in mixtures for module in (mixture.gate, mixture.shared_expert_gate)}
    recurrent = [module for module in model.modules() if isinstance(module, RecurrentLayer)]
    exact = routers | {id(projection) for module in recurrent for projection in module.rates}
    for layer in recurrent:
        layer.ops = NativeRecurrentOps(library)
    if recurrent and model.shard.is_whole:  # ranks exchange activations in the model's dtype
        model.model.embed_tokens.ops = FloatEmbedding()
    for module in model.modules():
        if isinstance(module, RMSNorm | Attention):
            module.ops = NativeLayerOps(library)
        elif isinstance(module, CausalConv):
            module.ops = NativeConvolutionOps(library, module)
        if module is model.lm_head:
            model.head.take()
        elif isinstance(module, Linear) and module.packable:
            bias = None if module.bias is None else module.bias.data
            rounded: Quantization = "none" if id(module) in exact else quantization
            module.ops = NativeProjection(pack_linear(library, module.take(), bias, quantization=rounded))
    for mixture in mixtures:
        if mixture.experts.down_proj.quantized is None:
            mixture.ops = NativeExperts(library, mixture.experts, quantization)
        else:
            little = False
    give_back()  # return the memory of the loaded weights
    return little


def use_native_linears(model: nn.Module, library: Library, quantization: Quantization = "none") -> int:
    """Replace a model's linear layers by native ones. Return their number.

    Weights are moved one by one, so that memory never holds all of them twice; weights that other modules share stay.
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
    give_back()  # return the memory of the loaded weights
    return count


def _shared(model: nn.Module) -> set[int]:
    """Return the ids of parameters that several modules share, such as an embedding that is also the head."""
    seen: set[int] = set()
    twice: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            (twice if id(parameter) in seen else seen).add(id(parameter))
    return twice
