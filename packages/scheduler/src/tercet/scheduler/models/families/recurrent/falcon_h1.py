"""Falcon-H1: attention and Mamba 2 side by side in every layer, with maximal update parametrization (muP)."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.config_fields import Fields, wrong
from tercet.scheduler.models.config.field_support import field_table
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.config.recurrent_config import Mamba2Config, parse_mamba2
from tercet.scheduler.models.family import ModelFamily
from tercet.scheduler.models.layers.decoder import CausalLM, DecoderLayer, states_of
from tercet.scheduler.models.layers.layer_ops import Batch
from tercet.scheduler.models.layers.layers import Attention, GatedMLP, Rotary
from tercet.scheduler.models.layers.mamba2 import Mamba2
from tercet.scheduler.models.layers.shard import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class FalconConfig(Mamba2Config):
    """Mamba 2 layers, and the multipliers of a layer's activations."""

    attention_in: float
    attention_out: float
    ssm_in: float
    ssm_out: float
    ssm: tuple[float, ...]
    """Multipliers of the parts of the Mamba 2 projection: gate, x, B, C and time steps."""
    mlp: tuple[float, ...]
    """Multipliers of the MLP's gate and output."""


class ScaledMamba2(Mamba2):
    """Mamba 2 with multipliers of the inputs and outputs of its projection."""

    factors: torch.Tensor

    def __init__(self, config: ModelConfig, layer_id: int, mamba: FalconConfig, shard: Shard) -> None:
        super().__init__(config, layer_id, mamba, shard)
        self._in = mamba.ssm_in
        inner, grouped = self.mamba.inner, self.mamba.groups * mamba.state_dim
        sizes = inner, inner, grouped, grouped, self.mamba.heads
        factors = [
            torch.full((size,), factor, dtype=config.dtype) for size, factor in zip(sizes, mamba.ssm, strict=True)
        ]
        self.register_buffer("factors", torch.cat(factors), persistent=False)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """See `Mamba2`."""
        return super().project(x * self._in) * self.factors


class ScaledMLP(GatedMLP):
    """A gated MLP with multipliers of its gate and its output."""

    def __init__(self, config: ModelConfig, shard: Shard, multipliers: tuple[float, ...]) -> None:
        super().__init__(config, shard, bias=config.mlp_bias)
        self._gate, self._out = multipliers

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """See `GatedMLP`."""
        gate, up = self.gate_up_proj(x).chunk(2, 1)
        return self.down_proj.partial(F.silu(gate * self._gate) * up) * self._out


class FalconLayer(DecoderLayer):
    """Attention and Mamba 2 of the same normalized residual, added, then MLP."""

    self_attn: Attention
    mlp: ScaledMLP

    def __init__(self, config: ModelConfig, number: int, rotary: Rotary, shard: Shard, mamba: FalconConfig) -> None:
        attention = Attention(
            config, number, rotary, shard, input_bias=config.attention_bias, output_bias=config.output_bias
        )
        super().__init__(config, attention, ScaledMLP(config, shard, mamba.mlp))
        self.mamba = ScaledMamba2(config, number, mamba, shard)
        self._multipliers = mamba
        self._shard = shard

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `DecoderLayer`."""
        factors, attention, mamba = self._multipliers, self.self_attn, self.mamba
        x, residual = self.input_layernorm.add(x, residual)
        qkv = attention.qkv_proj(x * factors.attention_in)
        attended = attention.o_proj(attention.attend(qkv, positions, batch)) * factors.attention_out
        scanned = mamba.out_proj(mamba.advance(x, batch)) * factors.ssm_out
        x, residual = self.post_attention_layernorm.add(attended + scanned, residual)
        return self._shard.collectives.all_reduce(self.mlp.partial(x)), residual


def build(config: ModelConfig, shard: Shard) -> CausalLM:
    """Build FalconH1ForCausalLM."""
    mamba = states_of(config, FalconConfig)
    return CausalLM(config, shard, lambda number, rotary: FalconLayer(config, number, rotary, shard, mamba))


def _normalize(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"num_key_value_heads": 8, "mamba_d_ssm": 1024, **config}


def _adapt(config: ModelConfig, fields: Fields) -> ModelConfig:
    inner = fields.count("mamba_d_ssm", fields.count("mamba_expand", 2) * config.hidden_size)
    mamba = parse_mamba2(fields, frozenset(range(config.layers)), inner, config.rms_norm_eps)
    norm: dict[str, Any] = {"norm": None}
    if fields.flag("mamba_rms_norm"):
        norm = {"norm": "before gate" if fields.flag("mamba_norm_before_gate", True) else "after gate"}
    falcon = FalconConfig(
        **{**asdict(mamba), "output_bias": fields.flag("projectors_bias"), **norm},
        attention_in=fields.number("attention_in_multiplier", 1.0),
        attention_out=fields.number("attention_out_multiplier", 1.0),
        ssm_in=fields.number("ssm_in_multiplier", 1.0),
        ssm_out=fields.number("ssm_out_multiplier", 1.0),
        ssm=_multipliers(fields, "ssm_multipliers", 5),
        mlp=_multipliers(fields, "mlp_multipliers", 2),
    )
    return replace(
        config,
        recurrent=falcon,
        attention_layers=range(config.layers),
        attention_scale=config.head_dim**-0.5 * fields.number("key_multiplier", 1.0),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logit_divisor=1 / fields.number("lm_head_multiplier", 1.0),
    )


def _multipliers(fields: Fields, name: str, count: int) -> tuple[float, ...]:
    numbers = fields.numbers(name) if fields.has(name) else (1.0,) * count
    if len(numbers) != count:
        raise wrong(name, f"must have {count} numbers")
    return numbers


FAMILIES = (
    ModelFamily(
        architectures=("FalconH1ForCausalLM",),
        build=build,
        fields=field_table(
            "attention_bias attention_in_multiplier attention_out_multiplier embedding_multiplier key_multiplier "
            "lm_head_multiplier mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_ssm mamba_d_state mamba_expand "
            "mamba_n_groups mamba_n_heads mamba_norm_before_gate mamba_proj_bias mamba_rms_norm mlp_bias "
            "mlp_multipliers projectors_bias ssm_in_multiplier ssm_multipliers ssm_out_multiplier time_step_limit",
            without_effect={
                "mamba_chunk_size": "a choice of kernels",
                "num_logits_to_keep": "of what a call returns",
                "layers_block_type": "every layer is of one kind",
                "layer_types": "every layer is of one kind",
            },
        ),
        defaults=ConfigDefaults(rms_norm_eps=1e-5),
        normalize=_normalize,
        adapt=_adapt,
    ),
)
