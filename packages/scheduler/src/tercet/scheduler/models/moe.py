"""A mixture of experts: the MLP of a layer in which a router chooses a few of many for each token."""

import torch
from torch import nn

from tercet.kernels.ops.moe import route
from tercet.scheduler.executor.model_config import ModelConfig
from tercet.scheduler.executor.moe_config import MoeConfig
from tercet.scheduler.models.layer_ops import OpsModule
from tercet.scheduler.models.layers import GatedMLP, Linear
from tercet.scheduler.models.shard import Shard


class Experts(nn.Module):
    """The weights of all experts of a layer, as one tensor for each projection. `MixtureOfExperts` computes with them.

    Its parameters are named as in checkpoints that store them so; most store every expert's apart: `ExpertNames`.
    """

    def __init__(self, config: ModelConfig, moe: MoeConfig, shard: Shard) -> None:
        super().__init__()
        size, hidden = shard.share(moe.intermediate_size, "expert columns"), config.hidden_size
        gate_up = torch.empty(moe.experts, 2 * size, hidden, dtype=config.dtype)
        down = torch.empty(moe.experts, hidden, size, dtype=config.dtype)
        self.gate_up_proj = nn.Parameter(gate_up, requires_grad=False)
        self.down_proj = nn.Parameter(down, requires_grad=False)


class MixtureOfExperts(OpsModule):
    """What a token's experts give, weighed by the router, and what the shared expert gives, weighed by its own gate."""

    def __init__(self, config: ModelConfig, moe: MoeConfig, shard: Shard) -> None:
        super().__init__()
        self.top_k = moe.top_k
        self.renormalise = moe.renormalise
        self.gate = Linear(config.hidden_size, moe.experts, bias=False, dtype=config.dtype)
        self.experts = Experts(config, moe, shard)
        self.shared_expert = GatedMLP(config, shard, size=moe.shared_size) if moe.shared_size else None
        self.shared_expert_gate = (
            Linear(config.hidden_size, 1, bias=False, dtype=config.dtype) if moe.shared_size else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        weights, experts = route(self.gate(x), self.top_k, renormalise=self.renormalise)
        out = self.ops.fused_moe(x, weights, experts, self.experts.gate_up_proj, self.experts.down_proj)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            out = out + self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        return out


def mlp_of(config: ModelConfig, layer: int, shard: Shard) -> GatedMLP | MixtureOfExperts:
    """The MLP of a layer: whichever the config says."""
    if config.moe is None or not config.moe.layers[layer]:
        return GatedMLP(config, shard)
    return MixtureOfExperts(config, config.moe, shard)
