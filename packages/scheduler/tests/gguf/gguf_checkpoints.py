"""Writer of GGUF files from checkpoints with random weights, as llama.cpp's converters write them."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

Array = npt.NDArray[Any]
Config = Mapping[str, Any]

ARCHITECTURES = {
    "llama": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "gpt_oss": "gpt-oss",
    "granite": "granite",
    "smollm3": "smollm3",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
}
PERMUTED = ("llama", "granite", "smollm3")
_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
_EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
_EXPERTS |= {"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"}


def write_gguf(directory: Path, path: Path) -> Path:
    """Write the float32 checkpoint in a directory, with its tokenizer, to a GGUF file."""
    config = json.loads((directory / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in _fields(config):
        _add(writer, f"{architecture}.{name}", value)
    _write_tokenizer(writer, directory, config["vocab_size"])
    for name, array in _tensors(directory, config, architecture):
        writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)


def _fields(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield the fields that have a value in the config, under llama.cpp's names."""
    rope: dict[str, Any] = config.get("rope_parameters") or {}
    yield "rope.freq_base_swa", rope.get("sliding_attention", {}).get("rope_theta")
    rope = rope.get("full_attention", rope)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head = config.get("head_dim") or hidden // heads
    yield "context_length", config["max_position_embeddings"]
    yield "embedding_length", hidden
    yield "block_count", config["num_hidden_layers"]
    yield "feed_forward_length", config["intermediate_size"]
    yield "attention.head_count", heads
    yield "attention.head_count_kv", config["num_key_value_heads"]
    yield "attention.layer_norm_rms_epsilon", float(config["rms_norm_eps"])
    yield "attention.sliding_window", config.get("sliding_window")
    yield "rope.freq_base", float(rope.get("rope_theta", 1e4))
    yield "attn_logit_softcapping", config.get("attn_logit_softcapping")
    yield "final_logit_softcapping", config.get("final_logit_softcapping")
    if "kv_lora_rank" in config:
        yield from _latent_fields(config)
    else:
        yield "attention.key_length", head
        yield "attention.value_length", head
        yield "rope.dimension_count", int(head * rope.get("partial_rotary_factor", 1.0))
    yield from _scaling_fields(config, rope)
    yield from _expert_fields(config)
    if config["model_type"] == "granite":
        yield "attention.scale", float(config["attention_multiplier"])
        yield "embedding_scale", float(config["embedding_multiplier"])
        yield "residual_scale", float(config["residual_multiplier"])
        yield "logit_scale", float(config["logits_scaling"])


def _scaling_fields(config: Config, rope: Config) -> Iterator[tuple[str, Any]]:
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        yield "rope.scaling.type", kind
        yield "rope.scaling.factor", float(rope["factor"])
        yield "rope.scaling.original_context_length", rope.get("original_max_position_embeddings")
    if kind == "yarn" and config["model_type"].startswith("deepseek"):
        yield "rope.scaling.yarn_log_multiplier", 0.1 * rope.get("mscale_all_dim", 0.0)
    if kind == "longrope":
        yield "rope.scaling.original_context_length", config["original_max_position_embeddings"]


def _expert_fields(config: Config) -> Iterator[tuple[str, Any]]:
    experts = next(
        (config[name] for name in ("n_routed_experts", "num_local_experts", "num_experts") if config.get(name)), None
    )
    if experts is None:
        return
    yield "expert_count", experts
    yield "expert_used_count", config.get("num_experts_per_tok")
    yield "expert_feed_forward_length", config.get("moe_intermediate_size")
    yield "expert_shared_feed_forward_length", config.get("shared_expert_intermediate_size")


def _latent_fields(config: Config) -> Iterator[tuple[str, Any]]:
    keys = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    yield "attention.q_lora_rank", config.get("q_lora_rank")
    yield "attention.kv_lora_rank", config["kv_lora_rank"]
    yield "attention.key_length", config["kv_lora_rank"] + config["qk_rope_head_dim"]
    yield "attention.value_length", config["kv_lora_rank"]
    yield "attention.key_length_mla", keys
    yield "attention.value_length_mla", config["v_head_dim"]
    yield "rope.dimension_count", config["qk_rope_head_dim"]
    yield "leading_dense_block_count", config["first_k_dense_replace"]
    yield "expert_shared_count", config.get("n_shared_experts")
    yield "expert_group_count", config.get("n_group")
    yield "expert_group_used_count", config.get("topk_group")
    yield "expert_weights_norm", bool(config.get("norm_topk_prob", False))
    yield "expert_weights_scale", float(config.get("routed_scaling_factor", 1.0))
    yield "expert_gating_func", 2 if config["model_type"] == "deepseek_v3" else 1


def _tensors(directory: Path, config: Config, architecture: str) -> Iterator[tuple[str, Array]]:
    stored = load_file(directory / "model.safetensors")
    experts: dict[str, dict[int, Array]] = {}
    for name, array in stored.items():
        if name == "model.embed_tokens.weight":
            yield "token_embd.weight", array
        elif name == "lm_head.weight":
            yield "output.weight", array
        elif name == "model.norm.weight":
            yield "output_norm.weight", array + ("gemma" in architecture)
        elif ".experts." in name and architecture != "gpt-oss":
            layer, expert, part = (name.split(".")[place] for place in (2, 5, 6))
            experts.setdefault(f"blk.{layer}.{_EXPERTS[part]}.weight", {})[int(expert)] = array
        else:
            yield from _layer_tensors(name, array, config, architecture)
    for name, each in experts.items():
        yield name, np.stack([each[number] for number in range(len(each))])
    yield from _factors(config)


def _layer_tensors(name: str, array: Array, config: Config, architecture: str) -> Iterator[tuple[str, Array]]:
    _, _, layer, rest = name.split(".", 3)
    prefix = f"blk.{layer}."
    if architecture == "gpt-oss" and ".experts." in name:
        yield from _gpt_oss_experts(prefix, rest.removeprefix("mlp.experts."), array)
        return
    if rest.endswith("e_score_correction_bias"):
        yield f"{prefix}exp_probs_b.bias", array
        return
    module, _, kind = rest.rpartition(".")
    if rest == "self_attn.sinks":
        module, kind = rest, "weight"
    if module == "self_attn.kv_b_proj":
        yield from _latent_tensors(prefix, array, config)
        return
    stem = _NAMES[module]
    if module == "post_attention_layernorm" and architecture in ("gemma2", "gemma3", "gpt-oss"):
        stem = "post_attention_norm"
    if stem in ("attn_q", "attn_k") and architecture in PERMUTED:
        heads = config["num_attention_heads" if stem == "attn_q" else "num_key_value_heads"]
        array = array.reshape(heads, 2, len(array) // heads // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    if "gemma" in architecture and "norm" in stem:
        array = array + 1
    yield f"{prefix}{stem}.{kind}", array.squeeze(0) if stem == "ffn_gate_inp_shexp" else array


def _latent_tensors(prefix: str, array: Array, config: Config) -> Iterator[tuple[str, Array]]:
    heads, nope, values = config["num_attention_heads"], config["qk_nope_head_dim"], config["v_head_dim"]
    both = array.reshape(heads, nope + values, -1)
    yield f"{prefix}attn_k_b.weight", both[:, :nope].swapaxes(1, 2)
    yield f"{prefix}attn_v_b.weight", both[:, nope:]


def _gpt_oss_experts(prefix: str, part: str, array: Array) -> Iterator[tuple[str, Array]]:
    kind = "bias" if part.endswith("_bias") else "weight"
    rows = array if kind == "bias" else array.swapaxes(1, 2)
    if part.startswith("down_proj"):
        yield f"{prefix}ffn_down_exps.{kind}", rows
        return
    yield f"{prefix}ffn_gate_exps.{kind}", rows[:, ::2]
    yield f"{prefix}ffn_up_exps.{kind}", rows[:, 1::2]


def _factors(config: Config) -> Iterator[tuple[str, Array]]:
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        yield "rope_factors_long.weight", np.array(rope["long_factor"])
        yield "rope_factors_short.weight", np.array(rope["short_factor"])
    if rope.get("rope_type") == "llama3":
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        yield "rope_freqs.weight", np.array([_llama3(rope, 2 * pair / head) for pair in range(head // 2)])


def _llama3(rope: Config, share: float) -> float:
    """Return the divisor of a frequency, as the formula of Llama 3.1 has it."""
    length = 2 * np.pi * rope["rope_theta"] ** share
    original, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    if length < original / high:
        return 1.0
    if length > original / low:
        return float(rope["factor"])
    smooth = (original / length - low) / (high - low)
    return float(1 / ((1 - smooth) / rope["factor"] + smooth))


def _write_tokenizer(writer: gguf.GGUFWriter, directory: Path, size: int) -> None:
    stored = json.loads((directory / "tokenizer.json").read_text())
    words = {number: text for text, number in stored["model"]["vocab"].items()}
    special = {token["id"]: token["content"] for token in stored["added_tokens"]}
    words |= special
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([words.get(number, f"[PAD{number}]") for number in range(size)])
    kinds = [gguf.TokenType.CONTROL if number in special else gguf.TokenType.NORMAL for number in range(size)]
    writer.add_token_types([kind if number in words else gguf.TokenType.UNUSED for number, kind in enumerate(kinds)])
    writer.add_token_merges([" ".join(merge) for merge in stored["model"]["merges"]])
    writer.add_eos_token_id(0)
    writer.add_chat_template((directory / "chat_template.jinja").read_text())
