"""DeepSeek-V2, V3, R1, Kimi K2 and GLM-4.7-Flash: latent attention, and experts in all but the first layers."""

from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.layers.decoder import CausalLM, DecoderLayer
from tercet.scheduler.models.layers.latent_attention import LatentAttention
from tercet.scheduler.models.layers.layers import Rotary
from tercet.scheduler.models.layers.moe import mlp_of
from tercet.scheduler.models.layers.shard import Shard


def build(config: ModelConfig, shard: Shard) -> CausalLM:
    """Build DeepseekV2ForCausalLM, DeepseekV3ForCausalLM or Glm4MoeLiteForCausalLM."""
    latent = config.latent
    if latent is None:
        raise ValueError(f"{config.architecture} has latent attention")

    def layer(number: int, rotary: Rotary) -> DecoderLayer:
        attention = LatentAttention(config, latent, number, rotary, shard)
        return DecoderLayer(config, attention, mlp_of(config, number, shard))

    return CausalLM(config, shard, layer)
