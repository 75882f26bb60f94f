"""Mixtures of experts: MLPs in which a router chooses a few of many experts for each token."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import nn

from tercet.kernels.ops.activation import Gate
from tercet.kernels.ops.moe import ExpertBiases, ExpertWeights, QuantizedExperts
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.config.moe_config import MoeConfig
from tercet.scheduler.models.layers.expert_parallel.tokens import tokens_of
from tercet.scheduler.models.layers.layer_ops import OpsModule
from tercet.scheduler.models.layers.layers import GatedMLP, SquaredReLUMLP
from tercet.scheduler.models.layers.linear import Linear, MappedRows, nothing
from tercet.scheduler.models.layers.norms import RMSNorm
from tercet.scheduler.models.layers.parameters import empty_parameter
from tercet.scheduler.models.layers.shard import Cut, Shard


class ExpertLinear(nn.Module):
    """A projection of all experts of a layer. A quantized model's weight is on the meta device until it is loaded.

    An expert's outputs are `runs` runs of rows of equal size. Until they are taken, they may stay in their mapped
    files, like those of a `Matrix`.
    """

    def __init__(
        self,
        experts: int,
        inputs: int,
        outputs: int,
        *,
        dtype: torch.dtype,
        quantized: bool,
        bias: bool = False,
        runs: int = 1,
    ) -> None:
        super().__init__()
        self.runs = runs
        self._mapped: dict[tuple[int, int], MappedRows] = {}
        self.weight = empty_parameter(experts, outputs, inputs, dtype=dtype, device="meta" if quantized else None)
        self.bias = empty_parameter(experts, outputs, dtype=dtype) if bias else None
        self.may_be_quantized = quantized
        self.quantized: QuantizedExperts | None = None

    @property
    def value(self) -> ExpertWeights:
        """The weight that `forward` uses."""
        return self.weight if self.quantized is None else self.quantized

    @property
    def is_mapped(self) -> bool:
        """Return whether any row is still in a mapped file."""
        return bool(self._mapped)

    def set_mapped(self, expert: int, run: int, mapped: MappedRows) -> None:
        """Leave a run of an expert's rows in its place, in any dtype, until it is taken."""
        self._mapped[expert, run] = mapped

    def set_all_mapped(self, mapped: MappedRows, *, interleaved: bool = False) -> None:
        """Lend all experts' rows [experts, outputs, inputs], whose runs may be interleaved row by row."""
        if not isinstance(mapped.rows, torch.Tensor):
            raise TypeError("quantized experts are lent one by one")
        experts, last = len(mapped.rows), self.runs - 1
        for run in range(self.runs):
            rows = mapped.rows[:, run :: self.runs] if interleaved else mapped.rows.chunk(self.runs, 1)[run]
            for expert in range(experts):
                taken = mapped.taken if (expert, run) == (experts - 1, last) else nothing
                self.set_mapped(expert, run, MappedRows(rows[expert], taken))

    def take(self) -> Iterator[list[torch.Tensor]]:
        """Yield each expert's runs of rows in the weight's dtype; at the end, remove the weight from the module."""
        for expert, weight in enumerate(self.weight.data):
            runs = list(weight.chunk(self.runs))
            mapped = {run: self._mapped.pop((expert, run)) for run in range(self.runs) if (expert, run) in self._mapped}
            for run, there in mapped.items():
                runs[run] = there.in_full(self.weight.dtype)
            yield runs
            for there in mapped.values():
                there.taken()
        self.weight.data = torch.empty(0)


class Experts(nn.Module):
    """The weights of the experts of a layer that this rank holds, which `MixtureOfExperts` uses.

    Without a gate, `gate_up_proj` is the up projection alone. Checkpoints store them in this form or, mostly, each
    expert separately: see `ExpertNames`.
    """

    def __init__(self, config: ModelConfig, moe: MoeConfig, shard: Shard, held: Sequence[int]) -> None:
        """Create the `held` experts, of whose columns this rank has those of `shard`."""
        super().__init__()
        self.held = held
        self.cut = Cut.items(moe.experts, held)
        """The held experts among all."""
        columns = shard.span(moe.intermediate_size, "expert columns")
        self.columns = Cut.span(moe.intermediate_size, columns)
        """The held columns of each expert's gate, up and down projections."""
        size, hidden = len(columns), moe.latent_size or config.hidden_size
        ups = 1 if moe.gate is None else 2
        quantized = config.quantization is not None
        self.gate_up_proj, self.down_proj = (
            ExpertLinear(len(held), inputs, outputs, dtype=config.dtype, quantized=quantized, bias=moe.bias, runs=runs)
            for inputs, outputs, runs in ((hidden, ups * size, ups), (size, hidden, 1))
        )

    @property
    def biases(self) -> ExpertBiases | None:
        """The biases of both projections; None without biases."""
        gate_up, down = self.gate_up_proj.bias, self.down_proj.bias
        return None if gate_up is None or down is None else ExpertBiases(gate_up, down)


class Router(Linear):
    """The router: logits of experts, and a correction that is added to their scores before they are compared."""

    def __init__(self, config: ModelConfig, moe: MoeConfig) -> None:
        dtype = torch.float32 if moe.float32_router else config.dtype
        super().__init__(config.hidden_size, moe.experts, bias=moe.bias, dtype=dtype)
        self.e_score_correction_bias = empty_parameter(moe.experts, dtype=torch.float32) if moe.has_correction else None

    def forward(self, x: torch.Tensor, *, gate: Gate | None = None) -> torch.Tensor:
        """Return logits [tokens, experts], in the router's dtype, of x [tokens, hidden]."""
        return super().forward(x.to(self.weight.dtype), gate=gate)


class MixtureOfExperts(OpsModule):
    """The weighted sum of a token's experts, plus the shared expert.

    The names are the checkpoints': `shared_expert` if it has a gate, otherwise `shared_experts`. Experts of
    latent size read a projection of the input, and the weighted sum of their outputs is projected back.
    """

    def __init__(self, config: ModelConfig, moe: MoeConfig, shard: Shard, layer: int) -> None:
        super().__init__()
        self._part = part = shard.of_experts
        self._inner_size, self._dtype = moe.latent_size or config.hidden_size, config.dtype
        self.tokens = tokens_of(shard, layer, moe.experts)
        self.routing = moe.routing
        self.expert_gate = moe.gate
        self.scales_inputs = moe.scales_inputs
        self.gate = Router(config, moe)
        self.experts = Experts(config, moe, part, self.tokens.held)
        kind = SquaredReLUMLP if moe.gate is None else partial(GatedMLP, gate=moe.gate)
        shared = kind(config, part, bias=config.mlp_bias, size=moe.shared_size) if moe.shared_size else None
        self.shared_expert = shared if moe.gates_shared else None
        self.shared_experts = None if moe.gates_shared else shared
        self.shared_expert_gate = (
            Linear(config.hidden_size, 1, bias=False, dtype=config.dtype) if self.shared_expert is not None else None
        )
        self.fc1_latent_proj, self.fc2_latent_proj = (
            None
            if moe.latent_size is None
            else Linear(*sizes, bias=config.mlp_bias, dtype=config.dtype, quantized=config.quantization is not None)
            for sizes in ((config.hidden_size, moe.latent_size), (moe.latent_size, config.hidden_size))
        )

    def process_weights_after_loading(self) -> None:
        """Zero the down projection's bias except on rank 0, like `RowParallelLinear`."""
        bias = self.experts.down_proj.bias
        if bias is not None and self._part.rank:
            bias.data.zero_()

    def forward(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None, after: RMSNorm | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply the experts to the normalized x + residual. See `Attention.forward`."""
        x, residual = norm.add(x, residual)
        own = self.tokens.own(x)
        out = self.tokens.whole(self._with_shared(own, self.mixed(own)), len(x))
        return out if after is None else after(out), residual

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the weighted sums of the experts of tokens x that this rank routes, or its summands of them."""
        if len(x):
            return self.tokens.mixed(*self.routed(x), self._compute)
        return self.mixed_without_tokens(x.device)

    def mixed_without_tokens(self, device: torch.device) -> torch.Tensor:
        """Compute experts for the tokens that other ranks may send. Return [0, hidden]."""
        x = torch.empty(0, self._inner_size, dtype=self._dtype, device=device)
        weights = torch.empty(0, self.routing.top_k, device=device)
        return self.tokens.mixed(x, weights, weights.long(), self._compute)

    def routed(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the inputs of the experts of tokens x, with their weights and experts. See `route`."""
        weights, experts = self.ops.route(self.gate(x), self.routing, self.gate.e_score_correction_bias)
        return x if self.fc1_latent_proj is None else self.fc1_latent_proj(x), weights, experts

    def _with_shared(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the mixture, given those of its routed experts."""
        if not len(x):
            return x
        out = out if self.fc2_latent_proj is None else self.fc2_latent_proj(out)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            out = out + self.shared_expert_gate(x).sigmoid() * self.shared_expert.partial(x)
        if self.shared_experts is not None:
            out = out + self.shared_experts.partial(x)
        return out

    def _compute(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Return the weighted sums of held experts. See `fused_moe`."""
        projections = self.experts.gate_up_proj.value, self.experts.down_proj.value
        biases, gate = self.experts.biases, self.expert_gate
        if not self.scales_inputs:
            return self.ops.fused_moe(x, weights, experts, *projections, gate=gate, biases=biases)
        scaled = (x[:, None] * weights[..., None].to(x.dtype)).flatten(0, 1)  # a row for each expert of each token
        ones, each = torch.ones_like(weights.reshape(-1, 1)), experts.reshape(-1, 1)
        out = self.ops.fused_moe(scaled, ones, each, *projections, gate=gate, biases=biases)
        return out.view(*weights.shape, -1).sum(1)


def mlp_of(config: ModelConfig, layer: int, shard: Shard) -> GatedMLP | MixtureOfExperts:
    """Return the MLP of a layer, plain or a mixture of experts."""
    if config.moe is None or not config.moe.layers[layer]:
        return GatedMLP(config, shard, bias=config.mlp_bias)
    return MixtureOfExperts(config, config.moe, shard, layer)
