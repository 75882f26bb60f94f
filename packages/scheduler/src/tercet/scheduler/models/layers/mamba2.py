"""Mamba 2 layers (arXiv 2405.21060)."""

import torch
import torch.nn.functional as F  # noqa: N812

from tercet.kernels.ops.recurrent import ScanInputs, Segments
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.config.recurrent_config import Mamba2Config
from tercet.scheduler.models.layers.linear import Linear
from tercet.scheduler.models.layers.norms import RMSNorm
from tercet.scheduler.models.layers.parameters import empty_parameter
from tercet.scheduler.models.layers.recurrent import CausalConv, RecurrentLayer


class Mamba2(RecurrentLayer):
    """A convolution and a state space scan; a gate, and mostly a norm of each group of heads."""

    name = "mamba"

    def __init__(self, config: ModelConfig, layer_id: int, mamba: Mamba2Config) -> None:
        super().__init__(layer_id)
        self.mamba = mamba
        size, dtype, quantized = config.hidden_size, config.dtype, config.quantization is not None
        projected = mamba.inner + mamba.channels + mamba.heads
        self.in_proj = Linear(size, projected, bias=mamba.bias, dtype=dtype, quantized=quantized)
        self.conv1d = CausalConv(mamba.channels, mamba.taps, dtype, bias=mamba.conv_bias)
        self.dt_bias, self.A_log, self.D = (empty_parameter(mamba.heads, dtype=torch.float32) for _ in range(3))
        self.norm = None if mamba.norm is None else RMSNorm(mamba.inner, mamba.norm_eps, dtype)
        self.out_proj = Linear(mamba.inner, size, bias=mamba.output_bias, dtype=dtype, quantized=quantized)

    def mix(self, x: torch.Tensor, states: tuple[torch.Tensor, ...], segments: Segments) -> torch.Tensor:
        """See `RecurrentLayer`."""
        inputs, matrices = states
        mamba, tokens = self.mamba, len(x)
        gate, mixed, steps = self.project(x).split_with_sizes((mamba.inner, mamba.channels, mamba.heads), 1)
        mixed = F.silu(self.conv1d(mixed, inputs, segments))
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
        groups = groups * torch.rsqrt(groups.square().mean(2, keepdim=True) + norm.eps)
        return norm.weight * groups.flatten(1).to(norm.weight.dtype)
