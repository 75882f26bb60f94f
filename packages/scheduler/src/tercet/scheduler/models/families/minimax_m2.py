"""MiniMax-M2: experts in every layer; all heads of the queries, and of the keys, are normalized as one vector."""

from functools import partial

from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.field_support import EXPERTS, field_table
from tercet.scheduler.models.config.moe_config import MoeDefaults
from tercet.scheduler.models.family import ModelFamily
from tercet.scheduler.models.layers.decoder import build_decoder

FAMILIES = (
    ModelFamily(
        architectures=("MiniMaxM2ForCausalLM",),
        build=partial(build_decoder, qk_norm="projections"),
        fields=field_table(EXPERTS + "rotary_dim scoring_func", ships_own_code=True),
        defaults=ConfigDefaults(head_dim=128, rope_theta=5e6, rotated_share=1.0, rotary_dim=True),
        moe=MoeDefaults(experts=256, top_k=8, renormalizes=True, score="sigmoid"),
        not_native="native kernels norm no heads together",
    ),
)
