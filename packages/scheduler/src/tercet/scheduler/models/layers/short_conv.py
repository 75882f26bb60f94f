"""LFM2's gated short convolutions."""

import torch

from tercet.kernels.ops.recurrent import Segments
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.config.recurrent_config import ShortConvConfig
from tercet.scheduler.models.layers.linear import FusedLinear, RowParallelLinear
from tercet.scheduler.models.layers.recurrent import CausalConv, RecurrentLayer
from tercet.scheduler.models.layers.shard import Cut, Shard


class ShortConv(RecurrentLayer):
    """LFM2's gated convolution: out(c * conv(b * x))."""

    name = "conv"

    def __init__(self, config: ModelConfig, layer_id: int, short: ShortConvConfig, shard: Shard) -> None:
        super().__init__(layer_id)
        size, dtype, quantized = config.hidden_size, config.dtype, config.quantization is not None
        channels = Cut.span(size, shard.span(size, "channels"))
        projected = {"in_proj": Cut.stacked([channels] * 3)}
        self.in_proj = FusedLinear(size, projected, bias=short.bias, dtype=dtype, quantized=quantized)
        self.conv = CausalConv(channels, short.taps, dtype, bias=short.bias)
        self.out_proj = RowParallelLinear(channels, size, shard, bias=short.bias, dtype=dtype, quantized=quantized)

    def mix(self, x: torch.Tensor, states: tuple[torch.Tensor, ...], segments: Segments) -> torch.Tensor:
        """See `RecurrentLayer`."""
        (inputs,) = states
        b, c, x = self.in_proj(x).chunk(3, 1)
        gated: torch.Tensor = c * self.conv(b * x, inputs, segments)
        return gated
