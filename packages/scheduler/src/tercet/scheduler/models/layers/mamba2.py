"""Mamba 2 layers (arXiv 2405.21060)."""

import torch
import torch.nn.functional as F  # noqa: N812

from tercet.kernels.ops.recurrent import ScanInputs, Segments
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.config.recurrent_config import Mamba2Config
from tercet.scheduler.models.layers.linear import FusedLinear, RowParallelLinear
from tercet.scheduler.models.layers.norms import RMSNorm
from tercet.scheduler.models.layers.parameters import empty_parameter
from tercet.scheduler.models.layers.recurrent import CausalConv, RecurrentLayer
from tercet.scheduler.models.layers.shard import Cut, Shard


class Mamba2(RecurrentLayer):
    """A convolution and a state space scan; a gate, and mostly a norm of each group of heads."""

    name = "mamba"

    def __init__(self, config: ModelConfig, layer_id: int, mamba: Mamba2Config, shard: Shard) -> None:
        super().__init__(layer_id)
        self.mamba, self._whole, self._shard = mamba.share(shard.size), mamba, shard
        size, dtype, quantized = config.hidden_size, config.dtype, config.quantization is not None
        held = shard.span(mamba.heads, "heads")
        self._groups = shard.shared_span(mamba.groups, "groups")
        inner, heads = Cut.span(mamba.heads, held, mamba.head_dim), Cut.span(mamba.heads, held)
        grouped = Cut.span(mamba.groups, self._groups, mamba.state_dim)
        channels = Cut.stacked([inner, grouped, grouped])
        projected = {"in_proj": Cut.stacked([inner, channels, heads])}
        self.in_proj = FusedLinear(size, projected, bias=mamba.bias, dtype=dtype, quantized=quantized)
        self.conv1d = CausalConv(channels, mamba.taps, dtype, bias=mamba.conv_bias)
        self.dt_bias, self.A_log, self.D = (empty_parameter(len(held), dtype=torch.float32) for _ in range(3))
        self.cuts = {"dt_bias": heads, "A_log": heads, "D": heads}
        self.norm = None if mamba.norm is None else RMSNorm(inner.held, mamba.norm_eps, dtype)
        if self.norm is not None:
            self.norm.cuts = {"weight": inner}
        self.out_proj = RowParallelLinear(inner, size, shard, bias=mamba.output_bias, dtype=dtype, quantized=quantized)

    def mix(self, x: torch.Tensor, states: tuple[torch.Tensor, ...], segments: Segments) -> torch.Tensor:
        """See `RecurrentLayer`."""
        inputs, matrices = states
        mamba, tokens = self.mamba, len(x)
        gate, mixed, steps = self.project(x).split_with_sizes((mamba.inner, mamba.channels, mamba.heads), 1)
        mixed = self.conv1d(mixed, inputs, segments, silu=True)
        grouped = mamba.groups * mamba.state_dim
        values, b, c = mixed.split_with_sizes((mamba.inner, grouped, grouped), 1)
        b, c = (each.reshape(tokens, mamba.groups, mamba.state_dim) for each in (b, c))
        values = values.reshape(tokens, mamba.heads, mamba.head_dim).float()
        steps = F.softplus(steps.float() + self.dt_bias).clamp(*mamba.time_step)
        scan = ScanInputs(c, b, values * steps[..., None], -self.A_log.exp() * steps)
        out = self.ops.state_space_scan(scan, matrices, segments) + values * self.D[:, None]
        return self._gated(out.flatten(1), F.silu(gate.float())).to(x.dtype)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Return gates, inputs of the convolution, and time steps, side by side."""
        projected: torch.Tensor = self.in_proj(x)
        return projected

    def _gated(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Apply the gate and the norm."""
        if self.norm is None:
            return out * gate
        if self.mamba.norm == "before gate":
            return self._normalized(out, self.norm) * gate
        return self._normalized(out * gate, self.norm)

    def _normalized(self, out: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """Apply the norm, whose mean squares are those of each group."""
        groups = out.view(len(out), self.mamba.groups, -1)
        squares = self._over_ranks(groups.square().sum(2)) / (self._whole.inner // self._whole.groups)
        groups = groups * torch.rsqrt(squares[..., None] + norm.eps)
        return norm.weight * groups.flatten(1).to(norm.weight.dtype)

    def _over_ranks(self, sums: torch.Tensor) -> torch.Tensor:
        """Return the sums [tokens, groups] over the ranks that have the same groups."""
        if self._shard.size <= self._whole.groups:
            return sums
        held = slice(self._groups.start, self._groups.stop)
        whole = sums.new_zeros(len(sums), self._whole.groups)
        whole[:, held] = sums
        return self._shard.collectives.all_reduce(whole)[:, held]
