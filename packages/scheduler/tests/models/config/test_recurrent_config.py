"""Configs of hybrid models as they are published, and their defaults, against transformers."""

from typing import Any

import pytest
import transformers

from tercet.scheduler.model_files import ModelError
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.config.recurrent_config import DeltaNetConfig
from tercet.scheduler.models.registry import parse_config

KIMI: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "dtype": "bfloat16",
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 7],
        "head_dim": 96,
        "kda_layers": [1, 2, 3, 5, 6],
        "num_heads": 24,
        "short_conv_kernel_size": 3,
    },
    "mla_use_nope": True,
    "model_max_length": 4096,
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 16,
    "num_experts_per_token": 8,
    "num_hidden_layers": 7,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "topk_group": 1,
    "use_grouped_topk": True,
    "vocab_size": 1000,
}
OLMO: dict[str, Any] = {
    "architectures": ["OlmoHybridForCausalLM"],
    "dtype": "bfloat16",
    "hidden_size": 96,
    "intermediate_size": 100,
    "num_attention_heads": 6,
    "max_position_embeddings": 100,
    "vocab_size": 1000,
}


def delta_net_of(config: ModelConfig) -> DeltaNetConfig:
    assert isinstance(config.recurrent, DeltaNetConfig)
    return config.recurrent


def linear_layers(config: Any) -> set[int]:
    return {layer for layer, kind in enumerate(config.layer_types) if kind == "linear_attention"}


def test_the_published_config_of_kimi_linear_counts_as_in_transformers() -> None:
    ours, theirs = parse_config(KIMI, {}), transformers.KimiLinearConfig.from_dict(dict(KIMI))
    net = delta_net_of(ours)
    assert net.layers == linear_layers(theirs) == {0, 1, 2, 4, 5}
    assert (net.heads, net.key_dim, net.taps) == (24, 96, 3)
    assert (net.heads, net.key_dim, net.taps) == (
        theirs.linear_num_heads,
        theirs.linear_head_dim,
        theirs.linear_conv_kernel_dim,
    )
    assert ours.moe is not None
    assert [*ours.moe.layers] == [kind == "sparse" for kind in theirs.mlp_layer_types]
    assert (ours.context_length, ours.moe.experts, ours.moe.routing.top_k) == (4096, 16, 8)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"mla_use_nope": False}, "mla_use_nope"),
        ({"use_grouped_topk": False}, "use_grouped_topk"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
        ({"linear_attn_config": []}, "linear_attn_config"),
        ({"linear_attn_config": {"full_attn_layers": 4, "kda_layers": [1]}}, "linear_attn_config.full_attn_layers"),
        ({"linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1]}}, "layer_types"),
    ],
)
def test_other_values_are_refused_by_name(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ModelError, match=f"config.json: {field}: "):
        parse_config({**KIMI, **change}, {})


@pytest.mark.parametrize("layers", [2, 3, 9])
def test_the_defaults_of_olmo_hybrid_are_those_of_transformers(layers: int) -> None:
    config = {**OLMO, "num_hidden_layers": layers, "linear_num_key_heads": None}
    ours = delta_net_of(parse_config(config, {}))
    theirs = transformers.OlmoHybridConfig(num_hidden_layers=layers, hidden_size=96, num_attention_heads=6)
    assert ours.layers == linear_layers(theirs)
    assert (ours.key_heads, ours.heads) == (theirs.linear_num_key_heads, theirs.linear_num_value_heads)
    assert (ours.key_dim, ours.value_dim) == (theirs.linear_key_head_dim, theirs.linear_value_head_dim)


@pytest.mark.parametrize(
    ("change", "rotates"),
    [
        ({}, True),
        ({"rope_parameters": None}, True),
        ({"rope_theta": None}, False),
        ({"rope_parameters": {"rope_theta": None, "rope_type": "default"}}, False),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": None, "rope_type": "default"}}, False),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}}, True),
    ],
)
def test_an_olmo_hybrid_whose_theta_is_null_does_not_rotate(change: dict[str, Any], rotates: bool) -> None:
    ours = parse_config({**OLMO, "num_hidden_layers": 4, **change}, {})
    theirs = transformers.OlmoHybridConfig.from_dict(dict(change))
    assert (theirs.rope_parameters["rope_theta"] is not None) is rotates
    assert ours.unrotated == (frozenset() if rotates else {3})
