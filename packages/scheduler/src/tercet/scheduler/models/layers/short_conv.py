"""Depthwise causal convolutions over a few tokens, and LFM2's layers, which gate their inputs and outputs."""

import torch
from torch import nn

from tercet.kernels.ops.recurrent import Segments, causal_conv
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.config.recurrent_config import ShortConvConfig
from tercet.scheduler.models.layers.layer_ops import Batch, OpsModule, states_of
from tercet.scheduler.models.layers.linear import Linear
from tercet.scheduler.models.layers.norms import RMSNorm
from tercet.scheduler.models.layers.parameters import empty_parameter


class CausalConv(nn.Module):
    """A depthwise convolution of each token with those before it; weight [channels, 1, taps]."""

    def __init__(self, channels: int, taps: int, dtype: torch.dtype, *, bias: bool) -> None:
        super().__init__()
        self.weight = empty_parameter(channels, 1, taps, dtype=dtype)
        self.bias = empty_parameter(channels, dtype=dtype) if bias else None

    def forward(self, x: torch.Tensor, states: torch.Tensor, segments: Segments) -> torch.Tensor:
        """Convolve x [tokens, channels], and advance the states [states, channels, taps - 1]."""
        return causal_conv(x, states, self.weight[:, 0], self.bias, segments)


class ShortConv(OpsModule):
    """LFM2's gated convolution: out(c * conv(b * x))."""

    def __init__(self, config: ModelConfig, layer_id: int, short: ShortConvConfig) -> None:
        super().__init__()
        self.layer_id = layer_id
        size, dtype, quantized = config.hidden_size, config.dtype, config.quantization is not None
        self.in_proj = Linear(size, 3 * size, bias=short.bias, dtype=dtype, quantized=quantized)
        self.conv = CausalConv(size, short.taps, dtype, bias=short.bias)
        self.out_proj = Linear(size, size, bias=short.bias, dtype=dtype, quantized=quantized)

    def forward(
        self,
        norm: RMSNorm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,  # noqa: ARG002
        batch: Batch,
        after: RMSNorm | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Advance the states by the normalized x + residual. See `Attention.forward`."""
        projected, residual = self.in_proj.project_normed(norm, x, residual)
        b, c, x = projected.chunk(3, 1)
        (inputs,), segments = states_of(batch, self.layer_id)
        return self.out_proj.project_onto(c * self.conv(b * x, inputs, segments), residual, after)
