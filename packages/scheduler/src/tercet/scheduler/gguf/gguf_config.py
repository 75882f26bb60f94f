"""The config.json that the metadata of a GGUF file stands for, in transformers' names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tercet.scheduler.gguf.gguf_fields import GGUFFields
from tercet.scheduler.gguf.gguf_file import GGUFFile
from tercet.scheduler.gguf.gguf_paths import GGUFError

Config = dict[str, Any]

Factors = Mapping[str, list[float]]
"""The values of the tensors that divide rotary frequencies, by their names."""

FACTOR_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors whose values are a part of config.json."""


@dataclass(frozen=True)
class GGUFArchitecture:
    """The differences of an architecture from Llama."""

    model_type: str
    transformers: str
    """The architecture's name in transformers."""
    numbers: Mapping[str, str] = field(default_factory=dict)
    """Fields of config.json with a number, and the metadata they come from; left out if that is."""
    counts: Mapping[str, str] = field(default_factory=dict)
    """The same for integers."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    extend: Callable[[GGUFFields, GGUFFile, Config], Config] = lambda _fields, _file, _config: {}
    """Further fields of config.json."""


def _llama(fields: GGUFFields, _file: GGUFFile, config: Config) -> Config:
    experts = fields.count("expert_count", 0)
    if not experts:
        return {}
    used = fields.count("expert_used_count")
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": experts,
        "num_experts_per_tok": used,
        "sliding_window": None,
        **{name: None for name in ("attention_bias", "mlp_bias") if config.get(name) is False},
    }


def _phi3(fields: GGUFFields, _file: GGUFFile, config: Config) -> Config:
    head = config["hidden_size"] // max(config["num_attention_heads"], 1)
    rotated, window = fields.count("rope.dimension_count", head), fields.count("attention.sliding_window", 0)
    share = {} if rotated == head or not head else {"partial_rotary_factor": rotated / head}
    return share | {
        "original_max_position_embeddings": fields.count(
            "rope.scaling.original_context_length", config["max_position_embeddings"]
        ),
        "sliding_window": window if 0 < window < config["max_position_embeddings"] else None,
    }


def _gemma(fields: GGUFFields, _file: GGUFFile, config: Config) -> Config:
    """Return what both Gemmas have. The largest of each scales queries by the share of a head, which no field says."""
    largest = {"gemma2": 46, "gemma3": 62}[fields.architecture]
    scalar = config.get("head_dim", 256)
    if config["num_hidden_layers"] == largest:
        scalar = config["hidden_size"] // config["num_attention_heads"]
    caps = "attn_logit_softcapping", "final_logit_softcapping"
    found = {name: fields.number(name) if fields.has(name) else None for name in caps}
    if fields.architecture == "gemma3":
        del found["attn_logit_softcapping"]
        found["rope_local_base_freq"] = fields.number("rope.freq_base_swa", 1e4)
    elif found["attn_logit_softcapping"] is None:
        found = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return {"query_pre_attn_scalar": scalar, "hidden_activation": "gelu_pytorch_tanh", **found}


def _gpt_oss(fields: GGUFFields, file: GGUFFile, config: Config) -> Config:
    scaling = config.get("rope_scaling")
    found: Config = {"rope_scaling": {**scaling, "truncate": False}} if scaling else {"rope_scaling": None}
    experts = file.tensors.get("blk.0.ffn_gate_exps.weight")
    if experts is not None and experts.type == "MXFP4":
        found["quantization_config"] = {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        }
    size = fields.count("expert_feed_forward_length", config["intermediate_size"])
    return found | {"intermediate_size": size}


def _deepseek(fields: GGUFFields, file: GGUFFile, config: Config) -> Config:
    mla = "_mla" if fields.has("attention.key_length_mla") else ""
    rotated, sigmoid = fields.count("rope.dimension_count"), fields.count("expert_gating_func", 1) == 2
    third = sigmoid or any("exp_probs_b" in name for name in file.tensors)
    groups = fields.count("expert_group_count", 1)
    found: Config = {
        "architectures": ["DeepseekV3ForCausalLM" if third else "DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v3" if third else "deepseek_v2",
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": fields.count("attention.q_lora_rank") if fields.has("attention.q_lora_rank") else None,
        "kv_lora_rank": fields.count("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": fields.count(f"attention.key_length{mla}") - rotated,
        "v_head_dim": fields.count(f"attention.value_length{mla}"),
        "n_group": groups,
        "topk_group": fields.count("expert_group_used_count", 1),
        "norm_topk_prob": fields.flag("expert_weights_norm", False),
        "routed_scaling_factor": fields.number("expert_weights_scale", 1.0) or 1.0,
    }
    if third:
        found["num_nextn_predict_layers"] = fields.count("nextn_predict_layers", 0)
    else:
        found["topk_method"] = "group_limited_greedy" if groups > 1 else "greedy"
    scaling = config.get("rope_scaling")
    if scaling:
        scale = fields.number("rope.scaling.yarn_log_multiplier", 0.0) / 0.1
        found["rope_scaling"] = {**scaling, "mscale": scale, "mscale_all_dim": scale}
    return found


_EXPERTS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
ARCHITECTURES = {
    "llama": GGUFArchitecture("llama", "LlamaForCausalLM", extend=_llama),
    "qwen2": GGUFArchitecture("qwen2", "Qwen2ForCausalLM", constants={"use_sliding_window": False}),
    "qwen2moe": GGUFArchitecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        counts=_EXPERTS | {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
        constants={"use_sliding_window": False, "norm_topk_prob": False, "qkv_bias": True},
    ),
    "qwen3": GGUFArchitecture("qwen3", "Qwen3ForCausalLM", constants={"use_sliding_window": False}),
    "qwen3moe": GGUFArchitecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        counts=_EXPERTS,
        constants={"use_sliding_window": False, "norm_topk_prob": True},
    ),
    "gemma2": GGUFArchitecture(
        "gemma2", "Gemma2ForCausalLM", counts={"sliding_window": "attention.sliding_window"}, extend=_gemma
    ),
    "gemma3": GGUFArchitecture(
        "gemma3_text", "Gemma3ForCausalLM", counts={"sliding_window": "attention.sliding_window"}, extend=_gemma
    ),
    "phi3": GGUFArchitecture("phi3", "Phi3ForCausalLM", extend=_phi3),
    "gpt-oss": GGUFArchitecture(
        "gpt_oss",
        "GptOssForCausalLM",
        counts={
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "sliding_window": "attention.sliding_window",
        },
        extend=_gpt_oss,
    ),
    "granite": GGUFArchitecture(
        "granite",
        "GraniteForCausalLM",
        numbers={
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
    ),
    "smollm3": GGUFArchitecture("smollm3", "SmolLM3ForCausalLM", constants={"no_rope_layer_interval": 4}),
    "deepseek2": GGUFArchitecture(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        counts={
            "n_routed_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "n_shared_experts": "expert_shared_count",
            "first_k_dense_replace": "leading_dense_block_count",
        },
        extend=_deepseek,
    ),
}
"""The architectures that GGUF files are read of, by `general.architecture`."""


def gguf_config(file: GGUFFile, factors: Factors, path: Path) -> Config:
    """Return the config.json of a model. Raise GGUFError for an architecture or a field that is not supported."""
    name = file.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        shown = str(name)[:40]
        raise GGUFError(f"{path}: general.architecture {shown!r} is not one of {', '.join(ARCHITECTURES)}")
    try:
        return _config(GGUFFields(file.metadata, name), file, factors)
    except GGUFError as error:
        raise GGUFError(f"{path}: {error}") from None


def _config(fields: GGUFFields, file: GGUFFile, factors: Factors) -> Config:
    architecture, embedding = ARCHITECTURES[fields.architecture], file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise GGUFError("token_embd.weight is missing or no matrix")
    heads = fields.count("attention.head_count")
    config: Config = {
        "architectures": [architecture.transformers],
        "model_type": architecture.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": fields.count("embedding_length"),
        "intermediate_size": fields.count("feed_forward_length", 0) or fields.count("expert_feed_forward_length"),
        "num_hidden_layers": fields.count("block_count") - fields.count("nextn_predict_layers", 0),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.count("attention.head_count_kv", heads),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": fields.count("context_length"),
        "rope_theta": fields.number("rope.freq_base", 1e4),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": _saved_dtype(file),
    }
    if fields.has("attention.key_length") and fields.architecture != "deepseek2":
        config["head_dim"] = fields.count("attention.key_length")
        if fields.count("attention.value_length", config["head_dim"]) != config["head_dim"]:
            raise GGUFError("keys and values of different lengths are not supported")
    config |= _biases(file, fields.architecture) | _scaling(fields, factors, config)
    config |= {name: fields.number(stored) for name, stored in architecture.numbers.items() if fields.has(stored)}
    config |= {name: fields.count(stored) for name, stored in architecture.counts.items() if fields.has(stored)}
    config |= architecture.constants
    return config | architecture.extend(fields, file, config)


def _saved_dtype(file: GGUFFile) -> str:
    """Return the dtype of most weights. Those in few bits count as bfloat16."""
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        dtype = {"F32": "float32", "F16": "float16"}.get(tensor.type, "bfloat16")
        sizes[dtype] = sizes.get(dtype, 0) + tensor.end - tensor.start
    return max(sizes, key=lambda dtype: sizes[dtype])


def _biases(file: GGUFFile, architecture: str) -> Config:
    """Return the fields of biases in families that have them."""
    queries, output = "blk.0.attn_q.bias" in file.tensors, "blk.0.attn_output.bias" in file.tensors
    if architecture in ("llama", "granite", "smollm3"):
        if queries != output:
            raise GGUFError("biases of queries without one of the output, or the other way round, are not supported")
        return {"attention_bias": queries, "mlp_bias": "blk.0.ffn_up.bias" in file.tensors}
    if architecture in ("qwen3", "qwen3moe", "gpt-oss"):
        return {"attention_bias": queries}
    if architecture == "deepseek2":
        return {"attention_bias": "blk.0.attn_kv_a_mqa.bias" in file.tensors}
    return {}


def _scaling(fields: GGUFFields, factors: Factors, config: Config) -> Config:
    """Return `rope_scaling`. Factors for each frequency, as Llama 3 has them, are those of longrope at any length."""
    length = config["max_position_embeddings"]
    original = fields.count("rope.scaling.original_context_length", length)
    attention = fields.number("rope.scaling.attn_factor", 0.0)
    if "rope_freqs.weight" in factors:
        each = factors["rope_freqs.weight"]
        if all(value == 1.0 for value in each):
            return {}
        longrope = {"type": "longrope", "factor": 1.0, "attention_factor": 1.0}
        return {
            "rope_scaling": longrope
            | {"short_factor": each, "long_factor": each, "original_max_position_embeddings": length}
        }
    if "rope_factors_long.weight" in factors and "rope_factors_short.weight" in factors:
        short, long = factors["rope_factors_short.weight"], factors["rope_factors_long.weight"]
        longrope = {"type": "longrope", "short_factor": short, "long_factor": long}
        return {"rope_scaling": longrope | ({"attention_factor": attention} if attention else {})}
    kind = fields.text("rope.scaling.type", "none")
    linear = fields.number("rope.scale_linear", 1.0)  # an older name
    factor = fields.number("rope.scaling.factor", linear)
    if kind == "linear" or (kind == "none" and linear != 1.0):
        return {"rope_scaling": {"type": "linear", "factor": factor}}
    if kind == "yarn":
        yarn = {"type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        for name in ("beta_fast", "beta_slow"):
            if fields.has(f"rope.scaling.yarn_{name}"):
                yarn[name] = fields.number(f"rope.scaling.yarn_{name}")
        return {"rope_scaling": yarn}
    if kind not in ("none", "longrope"):
        raise GGUFError(f"rope.scaling.type {kind[:40]!r} is not supported")
    return {}
