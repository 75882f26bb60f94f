"""Mamba 1 alone (arXiv 2312.00752), and Falcon-Mamba: no layer has attention or an MLP."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from tercet.kernels.ops.recurrent import Segments, SelectiveInputs
from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.config_fields import Fields
from tercet.scheduler.models.config.field_support import because, field_table
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.config.recurrent_config import MambaConfig, parse_mamba
from tercet.scheduler.models.families.recurrent.mamba2 import WITHOUT_ATTENTION
from tercet.scheduler.models.family import ModelFamily
from tercet.scheduler.models.layers.decoder import CausalLM, SingleLayer, states_of
from tercet.scheduler.models.layers.linear import FusedLinear, Linear, RowParallelLinear
from tercet.scheduler.models.layers.parameters import empty_parameter
from tercet.scheduler.models.layers.recurrent import CausalConv, RecurrentLayer
from tercet.scheduler.models.layers.shard import Cut, Shard

_DEFAULTS = {
    "vocab_size": 50_280,
    "hidden_size": 768,
    "num_hidden_layers": 32,
    "max_position_embeddings": 262_144,
}
"""transformers' defaults of absent fields. The length is that of Mamba 2."""
_HONOURED = "mamba_conv_bias mamba_d_conv mamba_d_state mamba_expand mamba_proj_bias time_step_rank"
_WITHOUT_EFFECT = because(
    {
        "a choice of kernels": "use_associative_scan use_falcon_mambapy use_mambapy",
        "every layer is of one kind": "layer_types",
        "of new weights": "rescale_prenorm_residual time_step_floor time_step_init_scheme time_step_max "
        "time_step_min time_step_scale",
        "residuals have the model's dtype here": "residual_in_fp32",
    }
)
_ALIASES = {
    "conv_kernel": "mamba_d_conv",
    "expand": "mamba_expand",
    "layer_norm_epsilon": "rms_norm_eps",
    "state_size": "mamba_d_state",
    "use_bias": "mamba_proj_bias",
    "use_conv_bias": "mamba_conv_bias",
}


class Mamba(RecurrentLayer):
    """A convolution, a selective scan and a gate. Each rank has some channels; all have the time steps' low rank."""

    name = "mamba"

    def __init__(self, config: ModelConfig, layer_id: int, mamba: MambaConfig, shard: Shard) -> None:
        super().__init__(layer_id)
        self.mamba = mamba
        size, dtype, quantized = config.hidden_size, config.dtype, config.quantization is not None
        channels = Cut.span(mamba.channels, shard.span(mamba.channels, "channels"))
        projected = {"in_proj": Cut.stacked([channels, channels])}
        self.in_proj = FusedLinear(size, projected, bias=mamba.bias, dtype=dtype, quantized=quantized)
        self.conv1d = CausalConv(channels, mamba.taps, dtype, bias=mamba.conv_bias)
        rates = mamba.step_rank + 2 * mamba.state_dim
        self.x_proj = RowParallelLinear(channels, rates, shard, bias=False, dtype=dtype, quantized=quantized)
        steps = {"dt_proj": channels}
        self.dt_proj = FusedLinear(mamba.step_rank, steps, bias=True, dtype=dtype, quantized=quantized)
        self.A_log = empty_parameter(channels.held, mamba.state_dim, dtype=torch.float32)
        self.D = empty_parameter(channels.held, dtype=torch.float32)
        self.cuts = {"A_log": channels, "D": channels}
        self.out_proj = RowParallelLinear(channels, size, shard, bias=mamba.bias, dtype=dtype, quantized=quantized)

    @property
    def rates(self) -> Sequence[Linear]:
        """See `RecurrentLayer`."""
        return self.x_proj, self.dt_proj

    def mix(self, x: torch.Tensor, states: tuple[torch.Tensor, ...], segments: Segments) -> torch.Tensor:
        """See `RecurrentLayer`."""
        inputs, channels = states
        sizes = self.mamba.step_rank, self.mamba.state_dim, self.mamba.state_dim
        values, gate = self.in_proj(x).chunk(2, 1)
        values = self.conv1d(values, inputs, segments, silu=True)
        steps, b, c = (self._normalized(each) for each in self.x_proj(values).split_with_sizes(sizes, 1))
        steps, values = F.softplus(self.dt_proj(steps).float()), values.float()
        scan = SelectiveInputs(c, b, values, steps, -self.A_log.exp())
        out = self.ops.selective_scan(scan, channels, segments) + values * self.D
        gated: torch.Tensor = out * F.silu(gate.float())
        return gated.to(x.dtype)

    def _normalized(self, x: torch.Tensor) -> torch.Tensor:
        """Apply a norm without a weight, if the model has norms."""
        eps = self.mamba.norm_eps
        return x if eps is None else F.rms_norm(x.float(), x.shape[1:], eps=eps).to(x.dtype)


def build(config: ModelConfig, shard: Shard) -> CausalLM:
    """Build MambaForCausalLM or FalconMambaForCausalLM."""
    mamba = states_of(config, MambaConfig)
    return CausalLM(config, shard, lambda number, _: SingleLayer(config, Mamba(config, number, mamba, shard)))


def _normalize(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add transformers' defaults, and the channels, which configs may state beside their ratio to the hidden size."""
    fields = Fields({**_DEFAULTS, **config})
    channels = fields.count("intermediate_size", fields.count("mamba_expand", 2) * fields.count("hidden_size"))
    return {**fields.values, **WITHOUT_ATTENTION, "intermediate_size": channels}


def _adapt(config: ModelConfig, fields: Fields) -> ModelConfig:
    mamba = parse_mamba(fields, config.layers, config.hidden_size, config.intermediate_size)
    return replace(config, recurrent=mamba)


def _adapt_falcon(config: ModelConfig, fields: Fields) -> ModelConfig:
    """Add the norms of Falcon-Mamba."""
    mamba = parse_mamba(fields, config.layers, config.hidden_size, config.intermediate_size)
    return replace(config, recurrent=replace(mamba, norm_eps=fields.number("mixer_rms_eps", 1e-6)))


FAMILIES = (
    ModelFamily(
        architectures=("MambaForCausalLM",),
        build=build,
        fields=field_table(_HONOURED, without_effect=_WITHOUT_EFFECT, aliases=_ALIASES),
        defaults=ConfigDefaults(rms_norm_eps=1e-5, tied=True),
        normalize=_normalize,
        adapt=_adapt,
    ),
    ModelFamily(
        architectures=("FalconMambaForCausalLM",),
        build=build,
        fields=field_table(f"{_HONOURED} mixer_rms_eps", without_effect=_WITHOUT_EFFECT, aliases=_ALIASES),
        defaults=ConfigDefaults(rms_norm_eps=1e-5, tied=True),
        normalize=_normalize,
        adapt=_adapt_falcon,
    ),
)
