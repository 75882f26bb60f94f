"""What configs of models with latent attention say, against what they say to transformers."""

import math
from typing import Any

import pytest
import transformers

from packages.scheduler.tests.models.config.test_model_config import LLAMA, parse
from tercet.scheduler.model_files import ModelError
from tercet.scheduler.models.config.latent_config import LatentConfig

FAMILIES = ["DeepseekV2", "DeepseekV3", "Glm4MoeLite"]
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
DENSE = {"first_k_dense_replace": 3, "mlp_layer_types": ["dense"] * 3}


def of(family: str, **changes: Any) -> Any:
    return parse({**LLAMA, **DENSE, "architectures": [f"{family}ForCausalLM"]}, **changes)


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_left_out_mean_what_they_mean_to_transformers(family: str) -> None:
    config, theirs = of(family), getattr(transformers, f"{family}Config")()
    assert config.latent == LatentConfig(
        rank=theirs.kv_lora_rank,
        query_rank=theirs.q_lora_rank,
        nope_dim=theirs.qk_nope_head_dim,
        rope_dim=theirs.qk_rope_head_dim,
        value_dim=theirs.v_head_dim,
    )
    assert (config.kv_heads, config.head_dim) == (1, theirs.kv_lora_rank + theirs.qk_rope_head_dim)
    assert config.attention_scale == theirs.qk_head_dim**-0.5
    assert (config.rms_norm_eps, config.attention_bias) == (theirs.rms_norm_eps, theirs.attention_bias)
    assert config.rope.theta == theirs.rope_parameters["rope_theta"]
    assert (config.rope.interleaved, config.rotary_dim) == (True, theirs.qk_rope_head_dim)


@pytest.mark.parametrize("family", FAMILIES)
def test_queries_may_be_projected_at_once(family: str) -> None:
    assert of(family, q_lora_rank=None).latent.query_rank == 0


def test_halves_may_be_rotated() -> None:
    assert not of("DeepseekV3", rope_interleave=False).rope.interleaved
    assert of("DeepseekV2", rope_interleave=False).rope.interleaved  # a field that it does not have


@pytest.mark.parametrize(("scales", "sharpened"), [({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0), ({}, 0.0)])
def test_yarn_of_published_models(scales: dict[str, float], sharpened: float) -> None:
    """That of DeepSeek-V3: cosines are left alone, scores are not. Without either number it is the other way round."""
    config = of("DeepseekV3", rope_scaling={**YARN, **scales}, max_position_embeddings=163840)
    factor = 0.1 * math.log(40) + 1
    assert config.context_length == 163840
    assert config.attention_scale == pytest.approx(192**-0.5 * (factor**2 if sharpened else 1))


def test_code_that_says_what_is_written_here_is_passed_over() -> None:
    """Kimi K2's too, whose architecture is DeepSeek-V3's."""
    code = {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}
    assert of("DeepseekV3", auto_map=code, model_type="kimi_k2").latent
    assert of("DeepseekV2", auto_map=code).latent


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": 0}, "kv_lora_rank: 0 is not a positive integer"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim: 7 is odd"),
        ({"rope_interleave": 1}, "rope_interleave: 1 is neither"),
        ({"q_lora_rank": None, "attention_bias": True}, "attention_bias: of latents"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers: -1"),
    ],
)
def test_nonsense_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        of("DeepseekV3", **changes)


def test_biases_of_mlps_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match="mlp_bias: "):
        of("DeepseekV2", mlp_bias=True)
