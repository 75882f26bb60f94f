"""OLMoE: experts in every layer; all heads of the queries, and of the keys, are normalized as one vector."""

from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.field_support import EXPERTS, Refused, field_table
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.config.moe_config import MoeDefaults
from tercet.scheduler.models.family import ModelFamily
from tercet.scheduler.models.layers.decoder import CausalLM, DecoderLayer
from tercet.scheduler.models.layers.layers import Attention, Rotary
from tercet.scheduler.models.layers.moe import mlp_of
from tercet.scheduler.models.layers.shard import Shard


def build(config: ModelConfig, shard: Shard) -> CausalLM:
    """Build OlmoeForCausalLM."""
    bias = config.attention_bias

    def layer(number: int, rotary: Rotary) -> DecoderLayer:
        attention = Attention(config, number, rotary, shard, input_bias=bias, output_bias=bias, qk_norm="projections")
        return DecoderLayer(config, attention, mlp_of(config, number, shard))

    return CausalLM(config, shard, layer)


FAMILIES = (
    ModelFamily(
        architectures=("OlmoeForCausalLM", "OlmoeModel"),
        build=build,
        fields=field_table(
            EXPERTS + "attention_bias norm_topk_prob",
            refused={
                "clip_qkv": Refused((), "queries, keys and values that are clipped are not supported"),
                "sliding_window": Refused((), "transformers applies the family's window in some of its kernels alone"),
            },
        ),
        defaults=ConfigDefaults(rms_norm_eps=1e-5),
        moe=MoeDefaults(experts=64, top_k=8),
        pad_token_id=1,
        not_native="native kernels norm no heads together",
    ),
)
