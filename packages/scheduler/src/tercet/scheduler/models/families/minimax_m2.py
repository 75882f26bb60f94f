"""MiniMax-M2: experts in every layer; all heads of the queries, and of the keys, are normalized as one vector."""

from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.field_support import EXPERTS, field_table
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.config.moe_config import MoeDefaults
from tercet.scheduler.models.family import ModelFamily
from tercet.scheduler.models.layers.decoder import CausalLM, DecoderLayer
from tercet.scheduler.models.layers.layers import Attention, Rotary
from tercet.scheduler.models.layers.moe import mlp_of
from tercet.scheduler.models.layers.shard import Shard


def build(config: ModelConfig, shard: Shard) -> CausalLM:
    """Build MiniMaxM2ForCausalLM."""

    def layer(number: int, rotary: Rotary) -> DecoderLayer:
        attention = Attention(config, number, rotary, shard, qk_norm="projections")
        return DecoderLayer(config, attention, mlp_of(config, number, shard))

    return CausalLM(config, shard, layer)


FAMILIES = (
    ModelFamily(
        architectures=("MiniMaxM2ForCausalLM",),
        build=build,
        fields=field_table(EXPERTS + "rotary_dim scoring_func", ships_own_code=True),
        defaults=ConfigDefaults(head_dim=128, rope_theta=5e6, rotated_share=1.0, rotary_dim=True),
        moe=MoeDefaults(experts=256, top_k=8, renormalizes=True, score="sigmoid"),
        not_native="native kernels norm no heads together",
    ),
)
