"""OLMo-Hybrid: Gated DeltaNet layers, whose inputs are normalized, and attention, whose outputs are."""

from dataclasses import replace
from functools import partial
from typing import Any

from tercet.scheduler.models.config.config_fields import Fields
from tercet.scheduler.models.config.field_support import field_table
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.config.recurrent_config import DeltaNetConfig, parse_delta_net
from tercet.scheduler.models.family import ModelFamily
from tercet.scheduler.models.layers.decoder import CausalLM, DecoderLayer, Norms, build_hybrid
from tercet.scheduler.models.layers.delta_net import GatedDeltaNet
from tercet.scheduler.models.layers.layers import Attention, GatedMLP, Rotary, Unrotated
from tercet.scheduler.models.layers.norms import RMSNorm
from tercet.scheduler.models.layers.shard import Shard


class PostNormLayer(DecoderLayer):
    """Attention, then MLP, each with a normalized output."""

    def __init__(self, config: ModelConfig, mixer: Attention, mlp: GatedMLP, norm: type[RMSNorm] = RMSNorm) -> None:
        super().__init__(config, mixer, mlp, norm)
        del self.input_layernorm
        self.post_feedforward_layernorm = norm(config.hidden_size, config.rms_norm_eps, config.dtype)

    @property
    def norms(self) -> Norms:
        """The norms of the layer."""
        return Norms(None, None, self.post_attention_layernorm, self.post_feedforward_layernorm)


def build(config: ModelConfig, shard: Shard) -> CausalLM:
    """Build OlmoHybridForCausalLM."""
    unrotated = Unrotated(config) if config.unrotated else None

    def attention(number: int, rotary: Rotary) -> Attention:
        return Attention(
            config,
            number,
            rotary if unrotated is None else unrotated,
            shard,
            input_bias=config.attention_bias,
            output_bias=config.output_bias,
            qk_norm="projections",
        )

    net = partial(GatedDeltaNet, config, separate=True)
    return build_hybrid(config, shard, DeltaNetConfig, net, attention, attention_layer=PostNormLayer)


def _adapt(config: ModelConfig, fields: Fields) -> ModelConfig:
    net = parse_delta_net(_with_defaults(config, fields), config.layers)
    most_beta = 2.0 if fields.flag("linear_allow_neg_eigval", True) else 1.0
    rope = fields.values.get("rope_scaling") or fields.values.get("rope_parameters") or {}
    rotates = {"rope_theta": 1e4, **fields.values, **rope}["rope_theta"] is not None  # null: no rotation
    return replace(
        config,
        recurrent=replace(net, norm_eps=1e-5, most_beta=most_beta),  # independent of rms_norm_eps
        unrotated=frozenset() if rotates else frozenset(range(config.layers)) - net.layers,
    )


def _with_defaults(config: ModelConfig, fields: Fields) -> Fields:
    """Return the fields with transformers' defaults of those that are absent."""
    key_heads = fields.count("linear_num_key_heads", config.heads)
    key_dim = fields.count("linear_key_head_dim", int(0.75 * config.hidden_size / key_heads))
    full = [layer for layer in range(config.layers) if layer % 4 == 3] or [config.layers - 1]
    usual: dict[str, Any] = {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": config.heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": 2 * key_dim,
        "layer_types": ["full_attention" if layer in full else "linear_attention" for layer in range(config.layers)],
    }
    return Fields(usual | {name: value for name, value in fields.values.items() if value is not None})


FAMILIES = (
    ModelFamily(
        architectures=("OlmoHybridForCausalLM",),
        build=build,
        fields=field_table(
            "attention_bias layer_types linear_allow_neg_eigval linear_conv_kernel_dim linear_key_head_dim "
            "linear_num_key_heads linear_num_value_heads linear_value_head_dim",
            without_effect=dict.fromkeys(
                ("linear_a_log_max", "linear_a_log_min", "linear_dt_init_floor", "linear_dt_max", "linear_dt_min"),
                "of training",
            ),
        ),
        adapt=_adapt,
    ),
)
