"""Layers that advance their states by the gated delta rule: Gated DeltaNet (arXiv 2412.06464), and Kimi Delta Attention
(arXiv 2510.26692).
"""

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

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


class DeltaProjections(NamedTuple):
    """The projections of a step's tokens."""

    mixed: torch.Tensor  # [tokens, channels]: queries, keys and values before the convolution
    decay: torch.Tensor  # see `DeltaInputs`
    beta: torch.Tensor  # [tokens, heads]
    gate: torch.Tensor  # [tokens, heads * value_dim]: factor of the normalized output


class DeltaNet(RecurrentLayer):
    """Linear attention with a state per value head: the gated delta rule, and a gate of the normalized output."""

    def __init__(self, config: ModelConfig, layer_id: int, net: DeltaNetConfig, *, separate: bool) -> None:
        """Create the parts that all kinds have. If `separate`, checkpoints may store three convolutions, and name the
        output as that of attention.
        """
        super().__init__(layer_id)
        self.net = net
        dtype, quantized = config.dtype, config.quantization is not None
        convs = {name.replace("proj", "conv1d"): cut.held for name, cut in qkv_parts(net).items()} if separate else {}
        self.conv1d = CausalConv(net.channels, net.taps, dtype, bias=False, parts=convs)
        self.norm = RMSNorm(net.value_dim, net.norm_eps, dtype)
        output = {"o_proj" if separate else "out_proj": whole(config.hidden_size)}
        self.out_proj = FusedLinear(net.heads * net.value_dim, output, bias=False, dtype=dtype, quantized=quantized)

    @abstractmethod
    def project(self, x: torch.Tensor) -> DeltaProjections:
        """Project x [tokens, hidden]."""

    def mix(self, x: torch.Tensor, states: tuple[torch.Tensor, ...], segments: Segments) -> torch.Tensor:
        """See `RecurrentLayer`."""
        inputs, matrices = states
        net = self.net
        mixed, decay, beta, gate = self.project(x)
        mixed = F.silu(self.conv1d(mixed, inputs, segments))
        keys = net.key_heads * net.key_dim
        q, k, v = mixed.split_with_sizes((keys, keys, net.heads * net.value_dim), 1)
        q, k = (each.view(len(x), net.key_heads, net.key_dim) for each in (q, k))
        v = v.view(len(x), net.heads, net.value_dim)
        out = self.ops.gated_delta_rule(DeltaInputs(q, k, v, decay, beta), matrices, segments).to(x.dtype)
        gated: torch.Tensor = self.norm(out) * gate.view_as(out)
        return gated.to(x.dtype).flatten(1)


class GatedDeltaNet(DeltaNet):
    """The layer of Qwen3-Next, Qwen3.5 and OLMo-Hybrid.

    Checkpoints store queries, keys and values together or, if `separate`, alone. If `grouped`, they store the
    projections of a key head and of its value heads together, as Qwen3-Next does.
    """

    name = "linear_attn"

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        net: DeltaNetConfig,
        *,
        grouped: bool = False,
        separate: bool = False,
    ) -> None:
        super().__init__(config, layer_id, net, separate=separate)
        dtype, quantized = config.dtype, config.quantization is not None
        values, channels, share = net.heads * net.value_dim, net.channels, net.heads // net.key_heads
        if grouped:
            mixed, rates = {"in_proj_qkvz": whole(channels + values)}, {"in_proj_ba": whole(2 * net.heads)}
        else:
            stored = qkv_parts(net) if separate else {"in_proj_qkv": whole(channels)}
            mixed = {**stored, "in_proj_z": whole(values)}
            rates = {"in_proj_b": whole(net.heads), "in_proj_a": whole(net.heads)}
        fused = partial(FusedLinear, config.hidden_size, bias=False, dtype=dtype, quantized=quantized)
        self.in_proj_qkvz, self.in_proj_ba = fused(mixed), fused(rates)
        if grouped:
            self.in_proj_qkvz.order = _ungrouped(net.key_heads, net.key_dim, net.key_dim, *[share * net.value_dim] * 2)
            self.in_proj_ba.order = _ungrouped(net.key_heads, share, share)
        self.dt_bias = empty_parameter(net.heads, dtype=torch.float32)
        self.A_log = empty_parameter(net.heads, dtype=torch.float32)

    @property
    def rates(self) -> Sequence[Linear]:
        """See `RecurrentLayer`."""
        return (self.in_proj_ba,)

    def project(self, x: torch.Tensor) -> DeltaProjections:
        """See `DeltaNet`."""
        net = self.net
        mixed, z = self.in_proj_qkvz(x).split_with_sizes((net.channels, net.heads * net.value_dim), 1)
        b, a = self.in_proj_ba(x).chunk(2, 1)
        decay = -self.A_log.exp() * F.softplus(a.float() + self.dt_bias)
        return DeltaProjections(mixed, decay, b.sigmoid() * net.most_beta, F.silu(z.float()))


class KimiDeltaAttention(DeltaNet):
    """The layer of Kimi-Linear: each row of a state has its own decay, and decays and gates are of low rank."""

    name = "self_attn"

    def __init__(self, config: ModelConfig, layer_id: int, net: DeltaNetConfig) -> None:
        super().__init__(config, layer_id, net, separate=True)
        quantized = config.quantization is not None
        values = net.heads * net.value_dim
        rows = net.heads * net.key_dim
        fused = partial(FusedLinear, config.hidden_size, bias=False, dtype=config.dtype, quantized=quantized)
        self.qkvg_proj = fused({**qkv_parts(net), "g_a_proj": whole(net.value_dim)})
        self.bf_proj = fused({"b_proj": whole(net.heads), "f_a_proj": whole(net.key_dim)})
        self.g_b_proj = Linear(net.value_dim, values, bias=False, dtype=config.dtype, quantized=quantized)
        self.f_b_proj = Linear(net.key_dim, rows, bias=False, dtype=config.dtype, quantized=quantized)
        self.dt_bias = empty_parameter(rows, dtype=torch.float32)
        self.A_log = empty_parameter(1, 1, net.heads, 1, dtype=torch.float32)

    @property
    def rates(self) -> Sequence[Linear]:
        """See `RecurrentLayer`."""
        return self.bf_proj, self.f_b_proj

    def project(self, x: torch.Tensor) -> DeltaProjections:
        """See `DeltaNet`."""
        net = self.net
        mixed, g = self.qkvg_proj(x).split_with_sizes((net.channels, net.value_dim), 1)
        b, f = self.bf_proj(x).split_with_sizes((net.heads, net.key_dim), 1)
        steps = F.softplus(self.f_b_proj(f).float() + self.dt_bias)
        decay = -self.A_log[0].exp() * steps.view(-1, net.heads, net.key_dim)
        return DeltaProjections(mixed, decay, b.sigmoid(), self.g_b_proj(g).float().sigmoid())


def qkv_parts(net: DeltaNetConfig) -> dict[str, Cut]:
    """Return the projections to queries, keys and values, for checkpoints that store them separately."""
    keys = whole(net.key_heads * net.key_dim)
    return {"q_proj": keys, "k_proj": keys, "v_proj": whole(net.heads * net.value_dim)}


def whole(size: int) -> Cut:
    """Return all of `size` rows, as the held part of a fused projection."""
    return Cut.span(size, range(size))


def _ungrouped(groups: int, *sizes: int) -> torch.Tensor:
    """Return the stored row of each row: the parts of all groups one after the other, where groups are stored."""
    stored = torch.arange(groups * sum(sizes)).view(groups, -1)
    return torch.cat([part.flatten() for part in stored.split_with_sizes(sizes, 1)])
