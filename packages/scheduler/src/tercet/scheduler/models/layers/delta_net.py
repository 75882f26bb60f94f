"""Gated DeltaNet layers of Qwen3-Next and Qwen3.5 (arXiv 2412.06464)."""

import torch
import torch.nn.functional as F  # noqa: N812

from tercet.kernels.ops.recurrent import DeltaInputs, Segments
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.config.recurrent_config import DeltaNetConfig
from tercet.scheduler.models.layers.linear import FusedLinear, Linear
from tercet.scheduler.models.layers.norms import RMSNorm
from tercet.scheduler.models.layers.parameters import empty_parameter
from tercet.scheduler.models.layers.recurrent import CausalConv, RecurrentLayer
from tercet.scheduler.models.layers.shard import Cut


class GatedDeltaNet(RecurrentLayer):
    """Linear attention with a state per value head: the gated delta rule, and a gate of the normalized output.

    If `grouped`, checkpoints store the projections of a key head and of its value heads together, as Qwen3-Next does.
    """

    name = "linear_attn"

    def __init__(self, config: ModelConfig, layer_id: int, net: DeltaNetConfig, *, grouped: bool) -> None:
        super().__init__(layer_id)
        self.net = net
        dtype, quantized = config.dtype, config.quantization is not None
        values = net.heads * net.value_dim
        mixed = {"in_proj_qkv": _whole(net.channels), "in_proj_z": _whole(values)}
        self.in_proj_qkvz = FusedLinear(config.hidden_size, mixed, bias=False, dtype=dtype, quantized=quantized)
        rates = {"in_proj_b": _whole(net.heads), "in_proj_a": _whole(net.heads)}
        self.in_proj_ba = FusedLinear(config.hidden_size, rates, bias=False, dtype=dtype, quantized=quantized)
        if grouped:
            share = net.heads // net.key_heads
            self.in_proj_qkvz.order = _ungrouped(net.key_heads, net.key_dim, net.key_dim, *[share * net.value_dim] * 2)
            self.in_proj_ba.order = _ungrouped(net.key_heads, share, share)
        self.conv1d = CausalConv(net.channels, net.taps, dtype, bias=False)
        self.dt_bias = empty_parameter(net.heads, dtype=torch.float32)
        self.A_log = empty_parameter(net.heads, dtype=torch.float32)
        self.norm = RMSNorm(net.value_dim, config.rms_norm_eps, dtype)
        self.out_proj = Linear(values, config.hidden_size, bias=False, dtype=dtype, quantized=quantized)

    def mix(self, x: torch.Tensor, states: tuple[torch.Tensor, ...], segments: Segments) -> torch.Tensor:
        """See `RecurrentLayer`."""
        inputs, matrices = states
        net = self.net
        mixed, z = self.in_proj_qkvz(x).split_with_sizes((net.channels, net.heads * net.value_dim), 1)
        b, a = self.in_proj_ba(x).chunk(2, 1)
        mixed = F.silu(self.conv1d(mixed, inputs, segments))
        keys = net.key_heads * net.key_dim
        q, k, v = mixed.split_with_sizes((keys, keys, net.heads * net.value_dim), 1)
        q, k = (each.view(len(x), net.key_heads, net.key_dim) for each in (q, k))
        decay = -self.A_log.exp() * F.softplus(a.float() + self.dt_bias)
        v = v.view(len(x), net.heads, net.value_dim)
        out = self.ops.gated_delta_rule(DeltaInputs(q, k, v, decay, b.sigmoid()), matrices, segments).to(x.dtype)
        gated: torch.Tensor = self.norm(out) * F.silu(z.float()).view_as(out)
        return gated.to(x.dtype).flatten(1)


def _whole(size: int) -> Cut:
    return Cut.span(size, range(size))


def _ungrouped(groups: int, *sizes: int) -> torch.Tensor:
    """Return the stored row of each row: the parts of all groups one after the other, where groups are stored."""
    stored = torch.arange(groups * sum(sizes)).view(groups, -1)
    return torch.cat([part.flatten() for part in stored.split_with_sizes(sizes, 1)])
