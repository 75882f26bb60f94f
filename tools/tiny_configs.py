"""Small configs of transformers' model types, for random models that a CPU computes in a second."""

import inspect
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

_WINDOW = 9
_SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": _WINDOW,
    "attention_chunk_size": _WINDOW,
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 300,
    "d_model": 64,
    "n_embd": 64,
    "dim": 64,
    "n_layer": 4,
    "n_head": 4,
    "d_ff": 96,
    "ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "decoder_layers": 4,
    "encoder_layers": 2,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "embedding_size": 64,
    "word_embed_proj_dim": 64,
    "n_positions": 256,
    "n_ctx": 256,
    "n_inner": 96,
    "rotary_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
    "max_seq_len": 256,
    "max_window_layers": 2,
    "index_topk": 8,
    "is_decoder": True,
}
"""Values of the fields with these names, in every config that has them."""
_SIGHT: dict[str, Any] = {
    "hidden_size": 32,
    "embed_dim": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
"""Values for the parts that do not read text."""
_LATENT = {"num_key_value_heads": 4, "num_attention_heads": 4, "qk_head_dim": 16, "head_dim": 8}
_SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
_MORE: dict[str, dict[str, Any]] = {
    "qwen2_vl_text": _SECTIONS,
    "qwen2_5_vl_text": _SECTIONS,
    "glm4v_text": _SECTIONS,
    "glm_ocr_text": _SECTIONS,
    "paddleocr_vl_text": _SECTIONS,
    "axk1": _LATENT,
    "axk2": _LATENT,
    "deepseek_v32": _LATENT,
    "glm_moe_dsa": _LATENT,
    "minicpm3": _LATENT,
    "youtu": _LATENT,
    "longcat_flash": {"num_key_value_heads": 4},
    "dots3_note": {"num_key_value_heads": 4},
    "dots3_note_text": {"num_key_value_heads": 4},
    "dbrx": {"n_heads": 4, "n_layers": 4, "max_seq_len": 256, "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4}},
    "zaya": {"num_experts_per_tok": 1},
    "llama4_text": {"no_rope_layers": [0] * 4, "attention_chunk_size": 256, "floor_scale": 8, "attn_scale": 0.5},
}
"""Additional or different values by type."""


class UnbuiltError(Exception):
    """Error: no small model of this type can be built."""


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Return a small config of a model type."""
    kind = CONFIG_MAPPING[model_type]
    return _shrunk(kind, _SIZES, model_type)


def _shrunk(kind: type[PreTrainedConfig], sizes: dict[str, Any], model_type: str) -> PreTrainedConfig:
    known = _known(kind)
    given = {name: value for name, value in sizes.items() if name in known}
    for name, sub in (kind.sub_configs or {}).items():
        if sub.__name__ == "AutoConfig":
            sub = type(getattr(kind(), name, None))
        if not issubclass(sub, PreTrainedConfig):
            continue
        reads = "text" in name or "decoder" in name or "llm" in name or "language" in name
        given[name] = _shrunk(sub, _SIZES if reads else _SIGHT, sub.model_type).to_dict()
    given |= _MORE.get(model_type, {})
    return kind(**given)


def _known(kind: type[PreTrainedConfig]) -> set[str]:
    """Return the names of the fields that a config accepts, aliases included."""
    names = {name for each in kind.__mro__ for name in getattr(each, "__annotations__", {})}
    names |= set(inspect.signature(kind.__init__).parameters)
    return names
