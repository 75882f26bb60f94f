"""gpt-oss: a sink per head, windows in every other layer, experts with biases and a clamped gate (`MoeConfig`)."""

from functools import partial

from tercet.scheduler.models.config.attention_windows import Windows, every_second_layer
from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.field_support import EXPERTS, NOT_READ, WINDOWS, field_table
from tercet.scheduler.models.config.moe_config import MoeDefaults
from tercet.scheduler.models.family import ModelFamily
from tercet.scheduler.models.layers.decoder import build_decoder

FAMILIES = (
    ModelFamily(
        architectures=("GptOssForCausalLM",),
        build=partial(build_decoder, sinks=True),
        fields=field_table(
            EXPERTS + WINDOWS + "attention_bias swiglu_alpha swiglu_limit", without_effect={"hidden_act": NOT_READ}
        ),
        defaults=ConfigDefaults(
            rms_norm_eps=1e-5,
            head_dim=64,
            attention_bias=("attention_bias", True),
            rope_theta=150_000.0,
            rope={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
        ),
        windows=Windows(usual=128, pattern=every_second_layer),
        moe=MoeDefaults(experts=128, top_k=4, renormalizes=True, gate="clamped", bias=True),
    ),
)
