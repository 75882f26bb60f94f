"""Granite 4: Mamba 2 layers between layers of attention, with or without experts."""

from dataclasses import replace

from tercet.kernels.ops.moe import Routing
from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.config_fields import Fields, wrong
from tercet.scheduler.models.config.field_support import EXPERTS, field_table
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.config.moe_config import MoeConfig
from tercet.scheduler.models.config.multipliers import MULTIPLIERS, with_multipliers
from tercet.scheduler.models.config.recurrent_config import Mamba2Config, parse_mamba2
from tercet.scheduler.models.family import ModelFamily
from tercet.scheduler.models.layers.decoder import CausalLM, DecoderLayer
from tercet.scheduler.models.layers.layers import Attention, Rotary, Unrotated
from tercet.scheduler.models.layers.mamba2 import Mamba2
from tercet.scheduler.models.layers.moe import mlp_of
from tercet.scheduler.models.layers.shard import Shard


def build(config: ModelConfig, shard: Shard) -> CausalLM:
    """Build GraniteMoeHybridForCausalLM."""
    mamba = config.recurrent
    if not isinstance(mamba, Mamba2Config):
        raise TypeError("the config has no Mamba 2 layers")
    if shard.size > 1:
        raise ValueError(f"{config.architecture} runs on one rank: its recurrent states are not split")
    unrotated = Unrotated(config)

    def layer(number: int, rotary: Rotary) -> DecoderLayer:
        mlp = mlp_of(config, number, shard)
        if number in mamba.layers:
            return DecoderLayer(config, Mamba2(config, number, mamba), mlp, mixer_name="mamba")
        table = unrotated if number in config.unrotated else rotary
        attention = Attention(
            config, number, table, shard, input_bias=config.attention_bias, output_bias=config.output_bias
        )
        return DecoderLayer(config, attention, mlp)

    return CausalLM(config, shard, layer)


def _adapt(config: ModelConfig, fields: Fields) -> ModelConfig:
    """Add the experts, whose shared one is the only MLP of a model without others."""
    shared = fields.count("shared_intermediate_size", 1024)
    rotates = fields.choice("position_embedding_type", ("nope", "rope"), "nope") == "rope"
    experts, top_k = fields.count("num_experts", 8, least=0), fields.count("num_experts_per_tok", 2, least=0)
    moe = None
    if experts:
        if not 0 < top_k <= experts:
            raise wrong("num_experts_per_tok", f"{top_k} of {experts} experts is not possible")
        moe = MoeConfig(
            experts=experts,
            routing=Routing(top_k=top_k, renormalize=True),
            intermediate_size=config.intermediate_size,
            shared_size=shared,
            layers=(True,) * config.layers,
            gates_shared=False,
        )
    return replace(
        with_multipliers(config, fields),
        intermediate_size=shared,
        moe=moe,
        unrotated=frozenset() if rotates else frozenset(range(config.layers)),
        recurrent=parse_mamba2(fields, config.layers, config.hidden_size),
    )


FAMILIES = (
    ModelFamily(
        architectures=("GraniteMoeHybridForCausalLM",),
        build=build,
        fields=field_table(
            MULTIPLIERS
            + EXPERTS
            + "attention_bias layer_types mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_state mamba_expand "
            "mamba_n_groups mamba_n_heads mamba_proj_bias position_embedding_type shared_intermediate_size "
            "time_step_limit",
            without_effect={"mamba_chunk_size": "a choice of kernels"},
            aliases={"layers_block_type": "layer_types"},
        ),
        defaults=ConfigDefaults(),
        adapt=_adapt,
    ),
)
