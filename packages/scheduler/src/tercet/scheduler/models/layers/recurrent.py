"""The base of layers with a recurrent state, and the causal convolution that they share."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, cast

import torch

from tercet.kernels.ops.recurrent import Segments
from tercet.scheduler.models.layers.layer_ops import Batch, OpsModule, RecurrentBatch
from tercet.scheduler.models.layers.linear import Linear
from tercet.scheduler.models.layers.norms import RMSNorm
from tercet.scheduler.models.layers.parameters import empty_parameter
from tercet.scheduler.models.layers.shard import Cut


class RecurrentLayer(OpsModule, ABC):
    """A layer with a recurrent state, in place of attention."""

    name: ClassVar[str]
    """Its name in checkpoints."""

    def __init__(self, layer_id: int, output: str = "out_proj") -> None:
        """Create the layer; `output` is the name of its last projection."""
        super().__init__()
        self.layer_id = layer_id
        self._output = output

    @property
    def output(self) -> Linear:
        """The projection of the states' outputs."""
        return cast("Linear", getattr(self, self._output))

    @property
    def rates(self) -> Sequence[Linear]:
        """The projections to rates of the state, whose errors add up: they are never quantized here."""
        return ()

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
        x, residual = norm.add(x, residual)
        return self.output.project_onto(self.advance(x, batch), residual, after)

    def advance(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Advance the states by normalized x [tokens, hidden]. Return the input of `output`."""
        states, segments = cast("RecurrentBatch", batch).states_of(self.layer_id)
        return self.mix(x, states, segments)

    @abstractmethod
    def mix(self, x: torch.Tensor, states: tuple[torch.Tensor, ...], segments: Segments) -> torch.Tensor:
        """Advance the states by x [tokens, hidden]. Return the input of `output`."""


class CausalConv(OpsModule):
    """A depthwise convolution of each token with those before it; weight [channels, 1, taps].

    `parts` are the names of convolutions that checkpoints may store separately, with their channels.
    """

    def __init__(
        self,
        channels: Cut,
        taps: int,
        dtype: torch.dtype,
        *,
        bias: bool,
        parts: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.channels = channels
        self.weight = empty_parameter(channels.held, 1, taps, dtype=dtype)
        self.bias = empty_parameter(channels.held, dtype=dtype) if bias else None
        self.parts = parts

    def forward(self, x: torch.Tensor, states: torch.Tensor, segments: Segments, *, silu: bool = False) -> torch.Tensor:
        """Convolve x [tokens, channels], and advance the states [states, channels, taps - 1]."""
        return self.ops.causal_conv(x, states, self.weight[:, 0], self.bias, segments, silu=silu)
