"""The text models of checkpoints that read more than text, in the names of both versions of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from packages.scheduler.tests.models.families.test_families import Paged, expected, load, some_tokens
from tercet.scheduler.architectures import is_ours, text_architecture
from tercet.scheduler.model_files import ModelError
from tercet.scheduler.models.registry import parse_config

SHAPE: dict[str, Any] = {
    "vocab_size": 389,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": None,
}
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 6,
    "kv_lora_rank": 16,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2], "mrope_interleaved": True}
BLOCKS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 3, 2]}
DELTA_NET = {
    "initializer_range": 0.08,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {**SECTIONS, "mrope_section": [1, 1, 1], "partial_rotary_factor": 0.5},
}
SIGHT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "kimi_k25": ("Kimi_K25", "deepseek_v3", LATENT, {}),
    "mistral3": ("Mistral3", "mistral", {}, {"model_type": "pixtral", "head_dim": 16, "image_size": 28}),
    "ministral3": (
        "Mistral3",
        "ministral3",
        {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.5}},
        {"model_type": "pixtral", "head_dim": 16, "image_size": 28},
    ),
    "llama4": (
        "Llama4",
        "llama4_text",
        {"intermediate_size_mlp": 72, "num_local_experts": 4, "interleave_moe_layer_step": 2},
        {"image_size": 28, "patch_size": 14, "vision_output_dim": 32, "projector_input_dim": 32},
    ),
    "mistral4": (
        "Mistral3",
        "mistral4",
        {**LATENT, "head_dim": 16, "n_shared_experts": 1, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.5}},
        {"model_type": "pixtral", "head_dim": 16, "image_size": 28},
    ),
    "qwen2_vl": ("Qwen2VL", "qwen2_vl_text", {"rope_parameters": BLOCKS}, {"depth": 1, "num_heads": 2}),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        "qwen2_5_vl_text",
        {"rope_parameters": BLOCKS},
        {"depth": 1, "num_heads": 2, "out_hidden_size": 48},
    ),
    "qwen3_vl": (
        "Qwen3VL",
        "qwen3_vl_text",
        {"rope_parameters": SECTIONS},
        {"depth": 1, "num_heads": 2, "out_hidden_size": 48, "deepstack_visual_indexes": [0]},
    ),
    "qwen3_5": ("Qwen3_5", "qwen3_5_text", DELTA_NET, {"depth": 1, "num_heads": 2, "out_hidden_size": 48}),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        "qwen3_5_moe_text",
        {
            **DELTA_NET,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 24,
        },
        {"depth": 1, "num_heads": 2, "out_hidden_size": 48},
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        "qwen3_vl_moe_text",
        {"rope_parameters": SECTIONS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        {"depth": 1, "num_heads": 2, "out_hidden_size": 48, "deepstack_visual_indexes": [0]},
    ),
}
"""Name to the class, the type of the text model, and what its config and that of the image part have."""


def config_of(name: str) -> Any:
    prefix, kind, text, sight = MODELS[name]
    parts = {"text_config": {"model_type": kind, **SHAPE, **text}, "vision_config": {**SIGHT, **sight}}
    return getattr(transformers, f"{prefix}Config")(**parts, tie_word_embeddings=False)


@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_a_text_model_computes_what_the_whole_one_does(name: str, original: bool, tmp_path: Path) -> None:
    kind = getattr(transformers, f"{MODELS[name][0]}ForConditionalGeneration")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = kind(config_of(name)).eval()
    model.save_pretrained(tmp_path, save_original_format=original)
    path = tmp_path / "model.safetensors"  # transformers 5.23 also renames Kimi's text layers to blocks
    save_file({name.replace("model.blocks.", "model.layers."): each for name, each in load_file(path).items()}, path)
    tokens = some_tokens(41, 1)
    [logits] = Paged(load(tmp_path), 1).step((0, tokens))
    torch.testing.assert_close(logits, expected(model, tokens), atol=1e-4, rtol=0)


def test_a_text_model_without_modules_here_is_not_ours() -> None:
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "starcoder2"}}
    assert not is_ours(text_architecture(config))
    assert is_ours(text_architecture({**config, "text_config": {"model_type": "mistral"}}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": 3}, "text_config: is not an object"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder: True is not supported"),
        ({"quantization_config": {"quant_method": "other"}}, "quant_method: 'other' is not one of"),
    ],
)
def test_fields_of_the_whole_model_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    config = json.loads(config_of("qwen3_vl").to_json_string())
    architectures = ["Qwen3VLForConditionalGeneration"]
    with pytest.raises(ModelError, match=message):
        parse_config({**config, "architectures": architectures, **changes}, {})
