"""Layers that advance their states by the gated delta rule: Gated DeltaNet (arXiv 2412.06464), and Kimi Delta Attention
(arXiv 2510.26692).
"""

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from tercet.kernels.ops.recurrent import DeltaInputs, GateName, Segments
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.config.recurrent_config import DeltaNetConfig
from tercet.scheduler.models.layers.linear import FusedLinear, Linear, RowParallelLinear
from tercet.scheduler.models.layers.norms import RMSNorm
from tercet.scheduler.models.layers.parameters import empty_parameter
from tercet.scheduler.models.layers.recurrent import CausalConv, RecurrentLayer
from tercet.scheduler.models.layers.shard import Cut, Shard


class DeltaProjections(NamedTuple):
    """The projections of a step's tokens."""

    mixed: torch.Tensor  # [tokens, channels]: queries, keys and values before the convolution
    decay: torch.Tensor  # see `DeltaInputs`
    beta: torch.Tensor  # [tokens, heads]
    gate: torch.Tensor  # [tokens, heads * value_dim]: gate of the normalized output


class HeadCuts(NamedTuple):
    """The parts of stored tensors that a rank holds: those of its key heads, and of the value heads that they serve."""

    keys: Cut
    values: Cut
    heads: Cut
    """One element of each value head."""

    @classmethod
    def of(cls, net: DeltaNetConfig, shard: Shard) -> "HeadCuts":
        """Return the parts of a layer's tensors."""
        key_heads, heads = shard.span(net.key_heads, "key heads"), shard.span(net.heads, "value heads")
        keys = Cut.span(net.key_heads, key_heads, net.key_dim)
        return cls(keys, Cut.span(net.heads, heads, net.value_dim), Cut.span(net.heads, heads))

    @property
    def qkv(self) -> dict[str, Cut]:
        """The projections to queries, keys and values, for checkpoints that store them separately."""
        return {"q_proj": self.keys, "k_proj": self.keys, "v_proj": self.values}

    @property
    def channels(self) -> Cut:
        """The channels of the convolution: queries, keys and values."""
        return Cut.stacked([*self.qkv.values()])


class DeltaNet(RecurrentLayer):
    """Linear attention with a state per value head: the gated delta rule, and a gate of the normalized output."""

    gate: ClassVar[GateName]
    """The gate's activation."""

    def __init__(
        self, config: ModelConfig, layer_id: int, net: DeltaNetConfig, shard: Shard, *, separate: bool
    ) -> None:
        """Create the parts that all kinds have. If `separate`, checkpoints may store three convolutions, and name the
        output as that of attention.
        """
        super().__init__(layer_id, "o_proj" if separate else "out_proj")
        self.net = net.share(shard.size)
        self.cut = HeadCuts.of(net, shard)
        dtype, quantized = config.dtype, config.quantization is not None
        convs = {name.replace("proj", "conv1d"): cut.whole for name, cut in self.cut.qkv.items()} if separate else {}
        self.conv1d = CausalConv(self.cut.channels, net.taps, dtype, bias=False, parts=convs)
        self.norm = RMSNorm(net.value_dim, net.norm_eps, dtype)
        values, size = self.cut.values, config.hidden_size
        output = RowParallelLinear(values, size, shard, bias=False, dtype=dtype, quantized=quantized)
        self.add_module(self._output, output)

    @abstractmethod
    def project(self, x: torch.Tensor) -> DeltaProjections:
        """Project x [tokens, hidden]."""

    def mix(self, x: torch.Tensor, states: tuple[torch.Tensor, ...], segments: Segments) -> torch.Tensor:
        """See `RecurrentLayer`."""
        inputs, matrices = states
        net, tokens = self.net, x.shape[0]
        mixed, decay, beta, gate = self.project(x)
        mixed = self.conv1d(mixed, inputs, segments, silu=True)
        keys = net.key_heads * net.key_dim
        q, k, v = mixed.split_with_sizes((keys, keys, net.heads * net.value_dim), 1)
        q, k = (each.view(tokens, net.key_heads, net.key_dim) for each in (q, k))
        v = v.view(tokens, net.heads, net.value_dim)
        out = self.ops.gated_delta_rule(DeltaInputs(q, k, v, decay, beta), matrices, segments)
        return self.ops.gated_rmsnorm(out, self.norm.weight, gate, net.norm_eps, self.gate)


class GatedDeltaNet(DeltaNet):
    """The layer of Qwen3-Next, Qwen3.5 and OLMo-Hybrid.

    Checkpoints store queries, keys and values together or, if `separate`, alone. If `grouped`, they store the
    projections of a key head and of its value heads together, as Qwen3-Next does.
    """

    name = "linear_attn"
    gate = "silu"

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        net: DeltaNetConfig,
        shard: Shard,
        *,
        grouped: bool = False,
        separate: bool = False,
    ) -> None:
        super().__init__(config, layer_id, net, shard, separate=separate)
        held, cut, share = shard.span(net.key_heads, "key heads"), self.cut, net.heads // net.key_heads
        sizes = net.key_dim, net.key_dim, share * net.value_dim, share * net.value_dim
        if grouped:
            mixed = {"in_proj_qkvz": Cut.span(net.key_heads, held, sum(sizes))}
            rates = {"in_proj_ba": Cut.span(net.key_heads, held, 2 * share)}
        else:
            mixed = {**(cut.qkv if separate else {"in_proj_qkv": cut.channels}), "in_proj_z": cut.values}
            rates = {"in_proj_b": cut.heads, "in_proj_a": cut.heads}
        quantized = config.quantization is not None
        fused = partial(FusedLinear, config.hidden_size, bias=False, dtype=config.dtype, quantized=quantized)
        self.in_proj_qkvz, self.in_proj_ba = fused(mixed), fused(rates)
        if grouped:
            self.in_proj_qkvz.order = _ungrouped(len(held), *sizes)
            self.in_proj_ba.order = _ungrouped(len(held), share, share)
        self.dt_bias = empty_parameter(cut.heads.held, dtype=torch.float32)
        self.A_log = empty_parameter(cut.heads.held, dtype=torch.float32)
        self.cuts = {"dt_bias": cut.heads, "A_log": cut.heads}

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
        return DeltaProjections(mixed, decay, b.sigmoid() * net.most_beta, z)


class KimiDeltaAttention(DeltaNet):
    """The layer of Kimi-Linear: each row of a state has its own decay, and decays and gates are of low rank."""

    name = "self_attn"
    gate = "sigmoid"

    def __init__(self, config: ModelConfig, layer_id: int, net: DeltaNetConfig, shard: Shard) -> None:
        super().__init__(config, layer_id, net, shard, separate=True)
        cut, quantized = self.cut, config.quantization is not None
        linear = partial(FusedLinear, bias=False, dtype=config.dtype, quantized=quantized)
        self.qkvg_proj = linear(config.hidden_size, {**cut.qkv, "g_a_proj": Cut.all(net.value_dim)})
        self.bf_proj = linear(config.hidden_size, {"b_proj": cut.heads, "f_a_proj": Cut.all(net.key_dim)})
        self.g_b_proj = linear(net.value_dim, {"g_b_proj": cut.values})
        self.f_b_proj = linear(net.key_dim, {"f_b_proj": cut.keys})
        self.dt_bias = empty_parameter(cut.keys.held, dtype=torch.float32)
        self.A_log = empty_parameter(1, 1, cut.heads.held, 1, dtype=torch.float32)
        self.cuts = {"dt_bias": cut.keys, "A_log": cut.heads.along(2)}

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
        return DeltaProjections(mixed, decay, b.sigmoid(), self.g_b_proj(g))


def _ungrouped(groups: int, *sizes: int) -> torch.Tensor:
    """Return the stored row of each row: the parts of all groups one after the other, where groups are stored."""
    stored = torch.arange(groups * sum(sizes)).view(groups, -1)
    return torch.cat([part.flatten() for part in stored.split_with_sizes(sizes, 1)])
