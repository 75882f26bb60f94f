"""SmolLM3: Llama with some layers without rotary embedding (`ModelConfig.unrotated`)."""

from dataclasses import replace

from tercet.scheduler.models.config.attention_windows import Windows
from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.config_fields import Fields, wrong
from tercet.scheduler.models.config.field_support import BIASES, WINDOWS, field_table
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.family import ModelFamily
from tercet.scheduler.models.layers.decoder import CausalLM, DecoderLayer
from tercet.scheduler.models.layers.layers import Attention, GatedMLP, Rotary, Unrotated
from tercet.scheduler.models.layers.shard import Shard


def build(config: ModelConfig, shard: Shard) -> CausalLM:
    """Build SmolLM3ForCausalLM."""
    unrotated = Unrotated(config)

    def layer(number: int, rotary: Rotary) -> DecoderLayer:
        table = unrotated if number in config.unrotated else rotary
        attention = Attention(
            config, number, table, shard, input_bias=config.attention_bias, output_bias=config.output_bias
        )
        return DecoderLayer(config, attention, GatedMLP(config, shard, bias=config.mlp_bias))

    return CausalLM(config, shard, layer)


def _unrotated(fields: Fields, layers: int) -> frozenset[int]:
    """Return the layers for which `no_rope_layers` has a 0; by default every fourth, or as the interval field says."""
    name = "no_rope_layers"
    every = fields.count("no_rope_layer_interval", 4)
    rotates = fields.values.get(name)
    if rotates is None:
        rotates = [int((layer + 1) % every != 0) for layer in range(layers)]
    if not isinstance(rotates, list) or len(rotates) != layers or any(one not in (0, 1) for one in rotates):
        raise wrong(name, f"must say 0 or 1 for each of the {layers} layers")
    return frozenset(layer for layer, one in enumerate(rotates) if not one)


def _with_unrotated(config: ModelConfig, fields: Fields) -> ModelConfig:
    return replace(config, unrotated=_unrotated(fields, config.layers))


def _windows_of_unrotated(fields: Fields, layers: int) -> list[bool]:
    unrotated = _unrotated(fields, layers)
    return [layer in unrotated for layer in range(layers)]


FAMILIES = (
    ModelFamily(
        architectures=("SmolLM3ForCausalLM", "SmolLM3Model"),
        build=build,
        fields=field_table(
            WINDOWS + BIASES + "use_sliding_window no_rope_layers no_rope_layer_interval", ships_own_code=True
        ),
        defaults=ConfigDefaults(tied=True, rope_theta=2e6),
        windows=Windows(switched=True, pattern=_windows_of_unrotated),
        adapt=_with_unrotated,
        pad_token_id=128_004,
    ),
)
