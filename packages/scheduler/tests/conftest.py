"""Tiny random checkpoints of every architecture, made by transformers, each with a tokenizer of its own."""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "A tercet is three lines that rhyme; a sonnet may end in two of them.",
    'She said: "Numbers like 3, 14 and 1592 are tokens too!" and left.',
    "Grüße aus Köln, naïve café, 東京 and 🙂 need more than one byte each.",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
VOCAB_SIZE = 389  # a few ids more than the tokenizer has, as padded vocabularies do

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
_SHARP_YARN = {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.3}
_LATENT = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "first_k_dense_replace": 3,
    "pad_token_id": None,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.2, 2.5, 7.0],
    "partial_rotary_factor": 0.75,
}
_WHOLE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
_SLIDES = {"use_sliding_window": True, "sliding_window": 7}
_LOCAL = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
_GEMMA = {
    "head_dim": 20,
    "query_pre_attn_scalar": 11,
    "sliding_window": 7,
    "pad_token_id": None,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3_rope": ("Llama", {"rope_parameters": _LLAMA3}),
    "llama_linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama_yarn": ("Llama", {"rope_parameters": _YARN}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "mistral": ("Mistral", {"sliding_window": 11, "head_dim": 10}),
    "ministral3": (
        "Ministral3",
        {"head_dim": 12, "pad_token_id": None, "rope_parameters": {**_SHARP_YARN, "llama_4_scaling_beta": 0.7}},
    ),
    "qwen2": ("Qwen2", {}),
    "qwen2_sliding": ("Qwen2", {**_SLIDES, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 20, "num_attention_heads": 5, "num_key_value_heads": 1}),
    "gemma2": ("Gemma2", {**_GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 9.0}),
    "gemma3": (
        "Gemma3Text",
        {**_GEMMA, "rope_parameters": _LOCAL, "final_logit_softcapping": 9.0},
    ),
    "qwen3_sliding": (
        "Qwen3",
        {**_SLIDES, "head_dim": 12, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.22,
            "logits_scaling": 3.0,
            "rms_norm_eps": 0.1,
        },
    ),
    "granite_biases": ("Granite", {"attention_multiplier": 0.35, "attention_bias": True, "mlp_bias": True}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1], "pad_token_id": None, "tie_word_embeddings": False}),
    "smollm3_sliding": (
        "SmolLM3",
        {
            **_SLIDES,
            "no_rope_layer_interval": 2,
            "pad_token_id": None,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "glm": ("Glm", {"head_dim": 12, "pad_token_id": None}),
    "glm_whole": ("Glm", {"head_dim": 8, "pad_token_id": None, "rope_parameters": _WHOLE, "attention_bias": False}),
    "ernie": ("Ernie4_5", {"head_dim": 12, "pad_token_id": None, "tie_word_embeddings": False}),
    "ernie_biases": ("Ernie4_5", {"head_dim": 8, "use_bias": True, "pad_token_id": None, "tie_word_embeddings": False}),
    "seed_oss": ("SeedOss", {"head_dim": 12, "pad_token_id": None}),
    "seed_oss_biases": (
        "SeedOss",
        {"pad_token_id": None, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True, "head_dim": 8},
    ),
    "phi3": ("Phi3", {"pad_token_id": None, "sliding_window": 11}),
    "phi3_longrope": (
        "Phi3",
        {
            "pad_token_id": None,
            "original_max_position_embeddings": 32,
            "rope_parameters": _LONGROPE,
        },
    ),
    "deepseek_v2": ("DeepseekV2", {**_LATENT, "q_lora_rank": None}),
    "deepseek_v3": ("DeepseekV3", {**_LATENT, "q_lora_rank": 20, "attention_bias": True}),
    "deepseek_v3_halves": ("DeepseekV3", {**_LATENT, "q_lora_rank": None, "rope_interleave": False}),
    "deepseek_v3_yarn": ("DeepseekV3", {**_LATENT, "q_lora_rank": 20, "rope_parameters": _SHARP_YARN}),
    "glm_flash": ("Glm4MoeLite", {**_LATENT, "q_lora_rank": 20, "mlp_layer_types": ["dense"] * 3}),
}
"""Name of each checkpoint, to its transformers class and what its config has beside the shape."""

_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "pad_token_id": None,
}
_GROUPS = {**_ROUTED, "n_group": 4, "topk_group": 2}
_GEMMA4 = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "head_dim": 12,
    "global_head_dim": 20,
    "sliding_window": 7,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "tie_word_embeddings": False,
    "final_logit_softcapping": 9.0,
    "pad_token_id": None,
}
_GEMMA3N = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "intermediate_size": [88, 40, 88, 56, 88, 72],
    "head_dim": 12,
    "sliding_window": 7,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 300,
    "altup_num_inputs": 3,
    "altup_active_idx": 1,
    "laurel_rank": 10,
    "activation_sparsity_pattern": [0.9, 0.0, 0.6, 0.0, 0.8, 0.0],
    "rope_parameters": _LOCAL,
    "tie_word_embeddings": False,
    "final_logit_softcapping": 9.0,
    "pad_token_id": None,
}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": (
        "Qwen3Moe",
        {**_EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1], "head_dim": 12, "attention_bias": True},
    ),
    "qwen3_moe_sliding": ("Qwen3Moe", {**_EXPERTS, "use_sliding_window": True, "sliding_window": 7}),
    "qwen2_moe": (
        "Qwen2Moe",
        {**_EXPERTS, **_SLIDES, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "intermediate_size": 40, "sliding_window": 11}),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 32,
            "head_dim": 12,
            "sliding_window": 7,
            "rope_parameters": {**_YARN, "truncate": False},
        },
    ),
    "glm4_moe": ("Glm4Moe", {**_GROUPS, "head_dim": 12, "use_qk_norm": True, "attention_bias": True}),
    "glm4_moe_air": (
        "Glm4Moe",
        {**_ROUTED, "n_shared_experts": 2, "norm_topk_prob": False, "routed_scaling_factor": 0.6},
    ),
    "dots1": (
        "Dots1",
        {**_GROUPS, "n_shared_experts": 1, "norm_topk_prob": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24, "head_dim": 12, "rotary_dim": 8},
    ),
    "deepseek_v2_moe": (
        "DeepseekV2",
        {**_LATENT, **_GROUPS, "topk_method": "group_limited_greedy", "n_shared_experts": 2, "q_lora_rank": 20},
    ),
    "deepseek_v2_greedy": ("DeepseekV2", {**_LATENT, **_ROUTED, "topk_method": "greedy", "q_lora_rank": None}),
    "deepseek_v3_moe": ("DeepseekV3", {**_LATENT, **_GROUPS, "q_lora_rank": 20}),
    "deepseek_v3_ungrouped": (
        "DeepseekV3",
        {**_LATENT, **_ROUTED, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "q_lora_rank": 20},
    ),
    "glm_flash_moe": ("Glm4MoeLite", {**_LATENT, **_ROUTED, "n_group": 1, "topk_group": 1, "q_lora_rank": 20}),
    "gemma4": ("Gemma4Text", _GEMMA4),
    "gemma3n": ("Gemma3nText", _GEMMA3N),
    "mimo_v2": (
        "MiMoV2Flash",
        {
            **_GROUPS,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "num_attention_heads": 4,
            "head_dim": 12,
            "v_head_dim": 8,
            "sliding_window": 7,
            "attention_bias": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.35},
            },
        },
    ),
    "gemma4_moe": (
        "Gemma4Text",
        {
            **_GEMMA4,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "llama4": (
        "Llama4Text",
        {
            "head_dim": 12,
            "intermediate_size": 32,
            "intermediate_size_mlp": 72,
            "num_hidden_layers": 4,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "moe_layers": [1, 3],
            "no_rope_layer_interval": 3,
            "attention_chunk_size": 16,
            "floor_scale": 8,
            "attn_scale": 0.4,
            "pad_token_id": None,
        },
    ),
    "mistral4": (
        "Mistral4",
        {
            **_LATENT,
            **_GROUPS,
            "q_lora_rank": 20,
            "n_shared_experts": 1,
            "rope_parameters": {**_SHARP_YARN, "llama_4_scaling_beta": 0.7},
        },
    ),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24}),
}
"""The same of models with experts."""
_DELTA_NET = {
    "num_hidden_layers": 4,
    "head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
_MAMBA2 = {
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_head": 12,
    "mamba_expand": 2,
}
_FALCON = {
    "num_hidden_layers": 2,
    "mamba_d_ssm": 60,
    "mamba_n_heads": 6,
    "mamba_n_groups": 3,
    "mamba_d_state": 16,
    "mamba_d_conv": 3,
    "embedding_multiplier": 1.5,
    "lm_head_multiplier": 0.7,
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.4,
    "ssm_multipliers": [0.5, 0.7, 1.2, 0.9, 0.8],
    "mlp_multipliers": [0.9, 0.6],
}
_NEMOTRON = {
    "mamba_num_heads": 6,
    "mamba_head_dim": 12,
    "n_groups": 3,
    "ssm_state_size": 16,
    "conv_kernel": 3,
    "head_dim": 12,
    "pad_token_id": None,
}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": (
        "Qwen3Next",
        {**_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
    ),
    "qwen3_5": (
        "Qwen3_5Text",
        {**_DELTA_NET, "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]},
    ),
    "lfm2": (
        "Lfm2",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "pad_token_id": None,
            "block_multiple_of": 8,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        {
            **_EXPERTS,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "pad_token_id": None,
            "conv_bias": True,
        },
    ),
    "granite_hybrid": ("GraniteMoeHybrid", {**_MAMBA2, "num_local_experts": 0, "shared_intermediate_size": 72}),
    "granite_hybrid_moe": (
        "GraniteMoeHybrid",
        {
            **_MAMBA2,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 32,
            "shared_intermediate_size": 40,
            "position_embedding_type": "rope",
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    "falcon_h1": ("FalconH1", _FALCON),
    "mamba2": (
        "Mamba2",
        {
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 12,
            "n_groups": 2,
            "state_size": 16,
            "conv_kernel": 3,
            "use_bias": True,
            "pad_token_id": None,
        },
    ),
    "mamba": (
        "Mamba",
        {"num_hidden_layers": 2, "state_size": 10, "conv_kernel": 3, "use_bias": True, "pad_token_id": None},
    ),
    "nemotron_h": (
        "NemotronH",
        {
            **_NEMOTRON,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "moe_latent_size": 20,
        },
    ),
    "qwen3_5_moe": ("Qwen3_5MoeText", {**_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 40}),
    "kimi_linear": (
        "KimiLinear",
        {
            **_LATENT,
            "num_hidden_layers": 4,
            "first_k_dense_replace": 1,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
            "linear_num_heads": 3,
            "linear_head_dim": 12,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
        },
    ),
    "kimi_linear_dense": (
        "KimiLinear",
        {
            **_LATENT,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense"] * 3,
            "linear_num_heads": 2,
            "linear_head_dim": 16,
            "linear_conv_kernel_dim": 3,
            "q_lora_rank": 20,
            "attention_bias": True,
        },
    ),
    "olmo_hybrid": (
        "OlmoHybrid",
        {
            "num_hidden_layers": 4,
            "linear_key_head_dim": 10,
            "linear_value_head_dim": 10,
            "pad_token_id": None,
            "attention_bias": True,
        },
    ),
    "olmo_hybrid_nope": (
        "OlmoHybrid",
        {
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 10,
            "linear_allow_neg_eigval": False,
            "rope_parameters": {"rope_theta": None, "rope_type": "default"},
            "pad_token_id": None,
        },
    ),
}
"""The same of models with recurrent layers."""
HYBRID_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba": (
        "Bamba",
        {
            "num_hidden_layers": 2,
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_n_groups": 4,
            "mamba_d_state": 12,
            "mamba_d_conv": 2,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "pad_token_id": None,
        },
    ),
    "falcon_mamba": (
        "FalconMamba",
        {
            "num_hidden_layers": 2,
            "state_size": 12,
            "time_step_rank": 5,
            "use_conv_bias": False,
            "tie_word_embeddings": False,
            "pad_token_id": None,
        },
    ),
    "falcon_h1_normed": (
        "FalconH1",
        {
            **_FALCON,
            "mamba_d_ssm": None,
            "mamba_d_conv": 4,
            "mamba_rms_norm": True,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "nemotron_h_biases": (
        "NemotronH",
        {
            **_NEMOTRON,
            "layers_block_type": ["mlp", "linear_attention", "moe", "full_attention"],
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "moe_latent_size": None,
            "norm_topk_prob": False,
            "use_bias": True,
            "use_conv_bias": False,
            "mlp_bias": True,
            "time_step_min": 0.2,
        },
    ),
}
"""The same layers with other options, whose generated tokens only a slow run compares."""
LATENT = [name for name in [*FAMILIES, *MIXTURES] if name.startswith(("deepseek", "glm_flash", "mistral4"))]
"""Those that cache latents."""


def make_checkpoint(family: str, directory: Path, variant: str = "", **changes: Any) -> Path:
    """Write a random float32 checkpoint, always the same, and a tokenizer into `directory`.

    `variant` is "sharded", "fused" (all experts of a layer in one tensor), or nothing; `changes` are of the config.
    """
    import torch
    import transformers

    prefix, extra = {**FAMILIES, **MIXTURES, **HYBRIDS, **HYBRID_VARIANTS}[family]
    config = getattr(transformers, f"{prefix}Config")(**{**_SHAPE, **extra, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(sum(family.encode()))
        model = getattr(transformers, f"{prefix.removesuffix('Text')}ForCausalLM")(config)
        for name, parameter in model.named_parameters():
            if (
                name.endswith(("bias", "sinks", ".D")) or "norm" in name
            ):  # transformers starts these at 0 and 1, which would hide mistakes
                torch.nn.init.normal_(parameter, 0.0 if name.endswith(("bias", "sinks")) else 1.0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # as far apart as scores are, so that both count
                torch.nn.init.normal_(buffer, 0.0, 0.03)
    size = "60KB" if variant == "sharded" else "1GB"
    model.save_pretrained(directory, max_shard_size=size, save_original_format=variant != "fused")
    write_tokenizer(directory)
    return directory


@cache
def trained_tokenizer() -> str:
    """Return a byte-level BPE trained on SENTENCES."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 5,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    serialized: str = tokenizer.to_str(pretty=True)
    return serialized


def write_tokenizer(directory: Path) -> None:
    """Write the trained tokenizer, with a chat template; id 0 ends a text."""
    (directory / "tokenizer.json").write_text(trained_tokenizer(), encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "model_max_length": 512}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def old_form(directory: Path, target: Path) -> Path:
    """A copy of a checkpoint whose config.json has the form of transformers 4."""
    shutil.copytree(directory, target)
    path = target / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    if "sliding_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    if config["model_type"].startswith("gemma"):  # every second layer sees everything
        del config["layer_types"]
        config["sliding_window_pattern"] = 2
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    older = kind == "linear" and "rope_local_base_freq" not in config
    config["rope_scaling"] = None if kind == "default" else {"type" if older else "rope_type": kind, **rope}
    config["torch_dtype"] = config.pop("dtype")
    if config["model_type"] == "qwen3_moe":
        config["num_experts"] = config.pop("num_local_experts")
    path.write_text(json.dumps(config))
    return target


ALL = [*FAMILIES, *MIXTURES]
NEW = ["gemma3n", "gemma4", "gemma4_moe", "mimo_v2", "mistral4"]
"""Those without configs in the form of transformers 4."""
SHARDED = ["llama/sharded", "llama_tied/sharded", "mixtral/sharded"]


@pytest.fixture(
    params=[
        *ALL,
        *SHARDED,
        *(f"{name}/old" for name in ALL if name not in NEW),
        *(f"{name}/fused" for name in MIXTURES),
    ]
)
def checkpoint(request: pytest.FixtureRequest, checkpoints: Callable[[str], Path]) -> Path:
    """Each checkpoint there is, in each form of config.json."""
    return checkpoints(request.param)


VARIANTS = {
    *("llama3_rope", "llama_linear", "llama_yarn", "llama_tied", "granite_biases", "smollm3_sliding", "glm_whole"),
    *("ernie_biases", "seed_oss_biases", "deepseek_v3_halves", "deepseek_v3_yarn", "deepseek_v2_greedy"),
    *("deepseek_v3_ungrouped", "glm4_moe_air", "dots1", "qwen3_moe_sliding"),
}
"""Families with the layers of another one, and other rotations, biases, windows or routing. In an ordinary run each
computes a whole prompt as transformers does, in every form of its checkpoint; further tests of them are slow."""


def distinct(names: Iterable[str]) -> list[Any]:
    """Return names of families for `parametrize`, of which `VARIANTS` are slow."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in VARIANTS else name for name in names]


@pytest.fixture(params=distinct(ALL))
def family(request: pytest.FixtureRequest, checkpoints: Callable[[str], Path]) -> Path:
    """One checkpoint of each family."""
    return checkpoints(request.param)


NOT_NATIVE = ["gemma3n", "gemma4", "gemma4_moe", "llama4", "mimo_v2", "ministral3", "minimax_m2", "olmoe", *LATENT]
"""Those whose decoder native kernels do not run whole."""


@pytest.fixture(params=distinct(name for name in ALL if name not in NOT_NATIVE))
def native_family(request: pytest.FixtureRequest, checkpoints: Callable[[str], Path]) -> Path:
    """One checkpoint of each family that native kernels run."""
    return checkpoints(request.param)


@pytest.fixture(scope="session")
def reference() -> Callable[..., Any]:
    """Loads transformers' own model of a directory: `reference(path, dtype=torch.float32)`.

    transformers 5.17 passes over MiniMax's `rotary_dim`, and caps attention's scores only where it is "eager".
    """
    import torch
    import transformers

    def load(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
        config = transformers.AutoConfig.from_pretrained(directory)
        if rotated := getattr(config, "rotary_dim", None):
            config.rope_parameters["partial_rotary_factor"] = rotated / config.head_dim
        attention = "eager" if getattr(config, "attn_logit_softcapping", None) else None
        given: dict[str, Any] = {"config": config, "dtype": dtype, "attn_implementation": attention}
        return getattr(transformers, config.architectures[0]).from_pretrained(directory, **given).eval()

    return load


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the directory of a checkpoint by name: that of a family, or "<family>/old", "/sharded" or "/fused".

    The first worker that asks for one makes it for all.
    """
    import torch

    torch.set_num_threads(1)  # on tiny matrices threads only wait for one another
    own = tmp_path_factory.getbasetemp()
    root = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "checkpoints"
    root.mkdir(exist_ok=True)

    @cache
    def checkpoint(name: str) -> Path:
        family, _, variant = name.partition("/")
        source = checkpoint(family) if variant == "old" else None
        target, unfinished = root / name.replace("/", "-"), root / "unfinished"
        with (root / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                shutil.rmtree(unfinished, ignore_errors=True)
                old_form(source, unfinished) if source else make_checkpoint(family, unfinished, variant)
                unfinished.rename(target)
        return target

    return checkpoint


@pytest.fixture
def other_devices() -> Iterator[None]:
    """A test that says which devices there are: they are looked for anew in it, and after it."""
    from tercet.scheduler.device.devices import first_gpu

    first_gpu.cache_clear()
    yield
    first_gpu.cache_clear()
