"""OLMoE: experts in every layer; all heads of the queries, and of the keys, are normalized as one vector."""

from functools import partial

from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.field_support import EXPERTS, Refused, field_table
from tercet.scheduler.models.config.moe_config import MoeDefaults
from tercet.scheduler.models.family import ModelFamily
from tercet.scheduler.models.layers.decoder import build_decoder

FAMILIES = (
    ModelFamily(
        architectures=("OlmoeForCausalLM", "OlmoeModel"),
        build=partial(build_decoder, qk_norm="projections"),
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
