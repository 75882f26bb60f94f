"""A mixture of experts: the MLP of a layer in which a router chooses a few of many for each token."""

from collections.abc import Iterator

import torch
from torch import nn

from tercet.kernels.ops.activation import Gate
from tercet.kernels.ops.moe import ExpertBiases, ExpertWeights, QuantizedExperts
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.config.moe_config import MoeConfig
from tercet.scheduler.models.layers.layer_ops import OpsModule
from tercet.scheduler.models.layers.layers import GatedMLP
from tercet.scheduler.models.layers.linear import Lent, Linear, nothing
from tercet.scheduler.models.layers.norms import RMSNorm
from tercet.scheduler.models.layers.parameters import empty_parameter
from tercet.scheduler.models.layers.shard import Cut, Shard


class ExpertLinear(nn.Module):
    """One projection of all experts of a layer. Of a quantised model it is on no device until it is loaded.

    An expert's outputs are `runs` runs of rows, of one size. Until they are taken away they may lie where they were
    found, as those of a `Matrix`.
    """

    def __init__(
        self,
        experts: int,
        inputs: int,
        outputs: int,
        *,
        dtype: torch.dtype,
        quantised: bool,
        bias: bool = False,
        runs: int = 1,
    ) -> None:
        super().__init__()
        self.runs = runs
        self._lent: dict[tuple[int, int], Lent] = {}
        self.weight = empty_parameter(experts, outputs, inputs, dtype=dtype, device="meta" if quantised else None)
        self.bias = empty_parameter(experts, outputs, dtype=dtype) if bias else None
        self.quantised: QuantizedExperts | None = None

    @property
    def value(self) -> ExpertWeights:
        """What is computed with."""
        return self.weight if self.quantised is None else self.quantised

    @property
    def is_lent(self) -> bool:
        """Whether any of it lies somewhere else."""
        return bool(self._lent)

    def lend(self, expert: int, run: int, lent: Lent) -> None:
        """Leave a run of an expert's rows where it is, in whatever dtype, until it is taken."""
        self._lent[expert, run] = lent

    def lend_all(self, lent: Lent, *, by_turns: bool = False) -> None:
        """The same of all experts' rows [experts, outputs, inputs], whose runs may be stored row by row by turns."""
        experts, last = len(lent.rows), self.runs - 1
        for run in range(self.runs):
            rows = lent.rows[:, run :: self.runs] if by_turns else lent.rows.chunk(self.runs, 1)[run]
            for expert in range(experts):
                taken = lent.taken if (expert, run) == (experts - 1, last) else nothing
                self.lend(expert, run, Lent(rows[expert], taken))

    def take(self) -> Iterator[list[torch.Tensor]]:
        """Each expert's runs of rows in the weight's dtype, of which the module keeps nothing in the end."""
        for expert, weight in enumerate(self.weight.data):
            runs = list(weight.chunk(self.runs))
            lent = {run: self._lent.pop((expert, run)) for run in range(self.runs) if (expert, run) in self._lent}
            for run, there in lent.items():
                runs[run] = there.rows.to(self.weight.dtype)
            yield runs
            for there in lent.values():
                there.taken()
        self.weight.data = torch.empty(0)


class Experts(nn.Module):
    """The weights of all experts of a layer, which `MixtureOfExperts` computes with.

    Checkpoints store them as here, or, as most do, every expert's apart: `ExpertNames`.
    """

    def __init__(self, config: ModelConfig, moe: MoeConfig, shard: Shard) -> None:
        super().__init__()
        held = shard.span(moe.intermediate_size, "expert columns")
        self.columns = Cut.span(moe.intermediate_size, held)
        """What is held of each expert's gate, of what it goes up to, and of what comes down."""
        size, hidden = len(held), config.hidden_size
        quantised = config.quantization is not None
        self.gate_up_proj, self.down_proj = (
            ExpertLinear(
                moe.experts, inputs, outputs, dtype=config.dtype, quantised=quantised, bias=moe.bias, runs=runs
            )
            for inputs, outputs, runs in ((hidden, 2 * size, 2), (size, hidden, 1))
        )

    @property
    def biases(self) -> ExpertBiases | None:
        """Of both projections, or of none."""
        gate_up, down = self.gate_up_proj.bias, self.down_proj.bias
        return None if gate_up is None or down is None else ExpertBiases(gate_up, down)


class Router(Linear):
    """The logits of experts, and what is added to their scores before these are compared."""

    def __init__(self, config: ModelConfig, moe: MoeConfig) -> None:
        dtype = torch.float32 if moe.full_router else config.dtype
        super().__init__(config.hidden_size, moe.experts, bias=moe.bias, dtype=dtype)
        self.e_score_correction_bias = empty_parameter(moe.experts, dtype=torch.float32) if moe.corrected else None

    def forward(self, x: torch.Tensor, *, gate: Gate | None = None) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, experts], of the dtype that the router has."""
        return super().forward(x.to(self.weight.dtype), gate=gate)


class MixtureOfExperts(OpsModule):
    """What a token's experts give, weighed by the router, and what the shared expert gives.

    That is `shared_expert` where a gate of its own weighs it, otherwise `shared_experts`: so checkpoints call it.
    """

    def __init__(self, config: ModelConfig, moe: MoeConfig, shard: Shard) -> None:
        super().__init__()
        self._shard = shard
        self.routing = moe.routing
        self.expert_gate = moe.gate
        self.gate = Router(config, moe)
        self.experts = Experts(config, moe, shard)
        shared = GatedMLP(config, shard, size=moe.shared_size) if moe.shared_size else None
        self.shared_expert = shared if moe.weighs_shared else None
        self.shared_experts = None if moe.weighs_shared else shared
        self.shared_expert_gate = (
            Linear(config.hidden_size, 1, bias=False, dtype=config.dtype) if self.shared_expert is not None else None
        )

    def process_weights_after_loading(self) -> None:
        """Add the bias of what comes down once, as `RowParallelLinear` does."""
        bias = self.experts.down_proj.bias
        if bias is not None and self._shard.rank:
            bias.data.zero_()

    def forward(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None, after: RMSNorm | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As attention: see there."""
        x, residual = norm.add(x, residual)
        weights, experts = self.ops.route(self.gate(x), self.routing, self.gate.e_score_correction_bias)
        projections = self.experts.gate_up_proj.value, self.experts.down_proj.value
        biases, gate = self.experts.biases, self.expert_gate
        out = self.ops.fused_moe(x, weights, experts, *projections, gate=gate, biases=biases)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            out = out + self.shared_expert_gate(x).sigmoid() * self.shared_expert.partial(x)
        if self.shared_experts is not None:
            out = out + self.shared_experts.partial(x)
        out = self._shard.collectives.all_reduce(out)
        return out if after is None else after(out), residual


def mlp_of(config: ModelConfig, layer: int, shard: Shard) -> GatedMLP | MixtureOfExperts:
    """The MLP of a layer: whichever the config says."""
    if config.moe is None or not config.moe.layers[layer]:
        return GatedMLP(config, shard)
    return MixtureOfExperts(config, config.moe, shard)
