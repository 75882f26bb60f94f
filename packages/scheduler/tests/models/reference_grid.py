"""Tiny models of every architecture whose config.json has one field changed, in transformers and here."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from packages.scheduler.tests.models.families.test_families import Paged, load
from tercet.scheduler.model_files import ModelError

LEFT_OUT = object()
"""In place of a value: the field is not in the file."""
_TOKENS = torch.arange(24)
_ROPE = {"rope_type": "default", "rope_theta": 100.0}
_SHAPE: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 0.01,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 0,
    "rope_parameters": _ROPE,
}
_TYPES = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_QWEN = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True}
_QWEN_EXPERTS = {**_EXPERTS, "num_experts": 4, "decoder_sparse_step": 1, "mlp_only_layers": [1]}
_DEEPSEEK = {
    **_EXPERTS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "attention_bias": True,
}
_LATENT = {
    **_DEEPSEEK,
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 6,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "head_dim": LEFT_OUT,
}
_GEMMA = {
    **_TYPES,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_act": LEFT_OUT,
    "sliding_window": 5,
    "attention_bias": True,
    "query_pre_attn_scalar": 11,
    "final_logit_softcapping": 3.0,
}
_LOCAL = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e3, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
_BIASES = {"attention_bias": True, "mlp_bias": True}
_DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 4,
    "linear_conv_kernel_dim": 4,
    "attention_bias": True,
    "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5},
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 6,
    "mamba_d_head": 4,
    "mamba_d_conv": 3,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": True,
    "attention_bias": True,
    "head_dim": LEFT_OUT,
}
_ALONE = dict.fromkeys(
    (
        *("rms_norm_eps", "rope_parameters", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
        "max_position_embeddings",
    ),
    LEFT_OUT,
)
"""Fields that models without attention do not have."""
_MAMBA1 = {
    **_ALONE,
    "head_dim": LEFT_OUT,
    "state_size": 6,
    "conv_kernel": 3,
    "expand": 2,
    "time_step_rank": 3,
    "use_bias": True,
    "use_conv_bias": True,
    "layer_norm_epsilon": 0.01,
}
_SHORT_CONVS = {
    "layer_types": ["conv", "full_attention", "conv"],
    "conv_L_cache": 3,
    "conv_bias": True,
    "norm_eps": 0.01,
    "head_dim": LEFT_OUT,
    "rms_norm_eps": LEFT_OUT,
    "hidden_act": LEFT_OUT,
}
BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "BambaForCausalLM": ("bamba", {**_MAMBA, "attn_layer_indices": [1], "mlp_bias": True}),
    "DeepseekV2ForCausalLM": ("deepseek_v2", {**_LATENT, "topk_method": "greedy", "norm_topk_prob": False}),
    "DeepseekV3ForCausalLM": ("deepseek_v3", {**_LATENT, "rope_interleave": True}),
    "Dots1ForCausalLM": ("dots1", {**_DEEPSEEK, "sliding_window": 5, "max_window_layers": 1}),
    "Ernie4_5ForCausalLM": ("ernie4_5", {"use_bias": True}),
    "FalconH1ForCausalLM": (
        "falcon_h1",
        {
            **_MAMBA,
            **_BIASES,
            "mamba_d_ssm": 32,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": True,
            "projectors_bias": True,
            "embedding_multiplier": 1.5,
            "lm_head_multiplier": 0.7,
            "key_multiplier": 0.6,
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.8,
            "ssm_in_multiplier": 1.3,
            "ssm_out_multiplier": 0.4,
            "ssm_multipliers": [0.5, 0.7, 1.2, 0.9, 0.8],
            "mlp_multipliers": [0.9, 0.6],
        },
    ),
    "FalconMambaForCausalLM": ("falcon_mamba", {**_MAMBA1, "mixer_rms_eps": 0.01}),
    "Gemma2ForCausalLM": ("gemma2", {**_GEMMA, "attn_logit_softcapping": 2.0}),
    "Gemma3ForCausalLM": ("gemma3_text", {**_GEMMA, "rope_parameters": _LOCAL}),
    "Gemma3nForCausalLM": (
        "gemma3n_text",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_act": LEFT_OUT,
            "rope_parameters": _LOCAL,
            "sliding_window": 5,
            "attention_bias": True,
            "final_logit_softcapping": 3.0,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 6,
            "vocab_size_per_layer_input": 40,
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "altup_correct_scale": False,
            "laurel_rank": 5,
            "activation_sparsity_pattern": [0.5, 0.0, 0.7, 0.0],
        },
    ),
    "Gemma4ForCausalLM": (
        "gemma4_text",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_act": LEFT_OUT,
            "rope_parameters": LEFT_OUT,
            "sliding_window": 5,
            "attention_bias": True,
            "final_logit_softcapping": 3.0,
            "global_head_dim": 12,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 6,
            "vocab_size_per_layer_input": 50,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 12,
        },
    ),
    "Glm4MoeForCausalLM": ("glm4_moe", {**_DEEPSEEK, "use_qk_norm": True}),
    "Glm4MoeLiteForCausalLM": (
        "glm4_moe_lite",
        {**_LATENT, "rope_interleave": True, "mlp_layer_types": ["dense", "sparse", "dense"]},
    ),
    "GlmForCausalLM": ("glm", {"attention_bias": True}),
    "GptOssForCausalLM": (
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5, "attention_bias": True},
    ),
    "GraniteForCausalLM": (
        "granite",
        {
            **_BIASES,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.5,
            "logits_scaling": 3.0,
            "head_dim": LEFT_OUT,
        },
    ),
    "GraniteMoeHybridForCausalLM": (
        "granitemoehybrid",
        {
            **_MAMBA,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 20,
            "position_embedding_type": "rope",
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.5,
            "logits_scaling": 3.0,
        },
    ),
    "KimiLinearForCausalLM": (
        "kimi_linear",
        {
            **{
                name: value
                for name, value in _LATENT.items()
                if name not in ("n_routed_experts", "first_k_dense_replace")
            },
            "num_local_experts": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "linear_num_heads": 2,
            "linear_head_dim": 6,
            "linear_conv_kernel_dim": 4,
            "rope_parameters": LEFT_OUT,
        },
    ),
    "Lfm2ForCausalLM": (
        "lfm2",
        {
            **_SHORT_CONVS,
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.3,
            "block_multiple_of": 4,
        },
    ),
    "Lfm2MoeForCausalLM": (
        "lfm2_moe",
        {
            **_SHORT_CONVS,
            **_EXPERTS,
            "num_experts": 4,
            "num_dense_layers": 1,
            "use_expert_bias": True,
            "routed_scaling_factor": 1.5,
        },
    ),
    "LlamaForCausalLM": ("llama", _BIASES),
    "Llama4ForCausalLM": (
        "llama4_text",
        {
            "intermediate_size_mlp": 20,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_layers": [1],
            "no_rope_layers": [1, 0, 1],
            "attention_chunk_size": 8,
            "floor_scale": 4,
            "attn_scale": 0.4,
            "attention_bias": True,
        },
    ),
    "Mamba2ForCausalLM": (
        "mamba2",
        {
            "num_heads": 8,
            "head_dim": 4,
            "n_groups": 2,
            "state_size": 6,
            "conv_kernel": 3,
            "expand": 2,
            "use_bias": True,
            "use_conv_bias": True,
            "layer_norm_epsilon": 0.01,
            **_ALONE,
        },
    ),
    "MambaForCausalLM": ("mamba", _MAMBA1),
    "MiMoV2FlashForCausalLM": (
        "mimo_v2_flash",
        {
            **_EXPERTS,
            **_TYPES,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "v_head_dim": 6,
            "sliding_window": 5,
            "attention_bias": True,
            "rope_parameters": {
                kind: {**_ROPE, "partial_rotary_factor": 0.5} for kind in ("full_attention", "sliding_attention")
            },
        },
    ),
    "Ministral3ForCausalLM": (
        "ministral3",
        {
            "sliding_window": 5,
            "rope_parameters": {
                **_ROPE,
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 8,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "MiniMaxM2ForCausalLM": ("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 4}),
    "MistralForCausalLM": ("mistral", {"sliding_window": 5}),
    "Mistral4ForCausalLM": (
        "mistral4",
        {
            **_LATENT,
            "rope_interleave": True,
            "rope_parameters": {
                **_ROPE,
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 8,
                "mscale": 0.7,
                "mscale_all_dim": 1.3,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "MixtralForCausalLM": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}),
    "NemotronHForCausalLM": (
        "nemotron_h",
        {
            **_EXPERTS,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 4,
            "n_groups": 2,
            "ssm_state_size": 6,
            "conv_kernel": 3,
            "use_bias": True,
            "use_conv_bias": True,
            "mlp_bias": True,
            "time_step_min": 0.2,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
            "moe_shared_expert_intermediate_size": 20,
            "moe_latent_size": 12,
            "layer_norm_epsilon": 0.01,
            "num_hidden_layers": LEFT_OUT,
            "rms_norm_eps": LEFT_OUT,
            "rope_parameters": LEFT_OUT,
            "hidden_act": LEFT_OUT,
        },
    ),
    "OlmoHybridForCausalLM": (
        "olmo_hybrid",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 6,
            "linear_conv_kernel_dim": 4,
            "linear_allow_neg_eigval": True,
            "attention_bias": True,
            "head_dim": LEFT_OUT,
        },
    ),
    "OlmoeForCausalLM": (
        "olmoe",
        {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "attention_bias": True, "head_dim": 4},
    ),
    "Phi3ForCausalLM": ("phi3", {"sliding_window": 5}),
    "Qwen2ForCausalLM": ("qwen2", _QWEN),
    "Qwen2MoeForCausalLM": (
        "qwen2_moe",
        {**_QWEN, **_QWEN_EXPERTS, "qkv_bias": True, "shared_expert_intermediate_size": 12},
    ),
    "Qwen3ForCausalLM": ("qwen3", {**_QWEN, "attention_bias": True}),
    "Qwen3MoeForCausalLM": (
        "qwen3_moe",
        {**_QWEN_EXPERTS, "attention_bias": True, "use_sliding_window": True, "sliding_window": 5},
    ),
    "Qwen3NextForCausalLM": (
        "qwen3_next",
        {**_DELTA_NET, **_QWEN_EXPERTS, "shared_expert_intermediate_size": 20},
    ),
    "Qwen3_5ForCausalLM": ("qwen3_5_text", _DELTA_NET),
    "Qwen3_5MoeForCausalLM": (
        "qwen3_5_moe_text",
        {**_DELTA_NET, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 20},
    ),
    "SeedOssForCausalLM": ("seed_oss", {**_BIASES, "attention_out_bias": True}),
    "SmolLM3ForCausalLM": (
        "smollm3",
        {**_BIASES, "use_sliding_window": True, "sliding_window": 5, "no_rope_layer_interval": 2},
    ),
}
"""Architecture to its `model_type` and what its config has beside the shape, so that every field counts."""
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 8.0,
        "beta_slow": 1.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "truncate": True,
    },
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 8,  # fewer than tokens: transformers rotates shorter texts otherwise
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.2, 2.5, 5.0, 7.0],
    },
}
_WORDS: dict[str, list[Any]] = {
    "hidden_act": ["gelu", "swish", "relu"],
    "hidden_activation": ["gelu", "gelu_new", "silu"],
    "topk_method": ["group_limited_greedy", "noaux_tc"],
    "attention_chunk_size": [4, 16],
    "layer_types": [
        _TYPES["layer_types"],
        ["full_attention", "sliding_attention", "full_attention"],
        ["attention", "attention", "sliding_attention"],
    ],
    "mlp_layer_types": [["sparse", "dense", "sparse"]],
    "no_rope_layers": [[0, 1, 1], [1, 1, 0]],
    "mlp_only_layers": [[], [0], [0, 2]],
    "kv_sharing_modes": [["store", "store", "reuse"]],
    "per_layer_config": [{"1": {"intermediate_size": 12}}, {"0": {"sliding_window": 3}}],
    "use_bidirectional_attention": [True],
    "is_causal": [False, True, None],
    "architectures": [],
    "model_type": [],
}
"""Values of fields that take no others, or whose type does not say which."""


def base_of(architecture: str) -> dict[str, Any]:
    """Return the config that fields are changed in."""
    kind, extra = BASES[architecture]
    config = {"architectures": [architecture], "model_type": kind, "dtype": "float32", **_SHAPE, **extra}
    return {name: value for name, value in config.items() if value is not LEFT_OUT}


def values_of(name: str, value: Any) -> list[Any]:
    """Return values that a field is changed to, from the one it has in the base or by default."""
    if name in _WORDS:
        return [*_WORDS[name], LEFT_OUT]
    match value:
        case bool():
            return [not value, None, LEFT_OUT]
        case int():
            return [value + 1, value * 2, max(value // 2, 1), 0, None, LEFT_OUT]
        case float():
            return [value * 1.7 + 0.1, 0.0, None, LEFT_OUT]
        case str():
            return ["other", None, LEFT_OUT]
        case _:
            return [True, 2, 0.5, LEFT_OUT]


def changed(config: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Return a config with one field changed or left out."""
    return {key: old for key, old in config.items() if key != name} | ({} if value is LEFT_OUT else {name: value})


@dataclass
class Outcome:
    """The logits of a changed config."""

    theirs: torch.Tensor
    ours: torch.Tensor | None
    refusal: str = ""
    same_as_base: bool = False
    """Whether the reference gives what it gives to the base."""


class Grid:
    """One architecture's base model, and what becomes of it when a field is changed."""

    def __init__(self, architecture: str, directory: Path) -> None:
        self.base = base_of(architecture)
        self.directory = directory
        self.count = 0
        self.weights: Path | None = None
        self.state: dict[str, torch.Tensor] = {}
        found = self.outcome(self.base)
        if found is None:
            raise ValueError(f"transformers does not run the base of {architecture}")
        self.expected = found.theirs

    def outcome(self, config: Mapping[str, Any]) -> Outcome | None:
        """Return the logits of a config; None where transformers cannot run it."""
        folder = self.directory / str(self.count)
        self.count += 1
        folder.mkdir(parents=True)
        file = folder / "config.json"
        file.write_text(json.dumps(config))
        model = _reference(folder)
        if model is None:
            return None
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        tied = config.get("tie_word_embeddings") != self.base["tie_word_embeddings"]
        if not tied and shapes == {name: tensor.shape for name, tensor in self.state.items()}:
            model.load_state_dict(self.state)
            (folder / "model.safetensors").symlink_to(self.weights or folder)
        else:
            _fill(model)
            if not _saved(model, folder):
                return None
            file.write_text(json.dumps(config))
            if not self.state:
                self.state, self.weights = model.state_dict(), folder / "model.safetensors"
        theirs = _logits(model)
        if theirs is None:
            return None
        same = self.count > 1 and theirs.shape == self.expected.shape
        same = same and torch.allclose(theirs, self.expected, atol=1e-5)  # other chunks round otherwise
        try:
            [ours] = Paged(load(folder), 1).step((0, _TOKENS))
            return Outcome(theirs, ours, same_as_base=same)
        except ModelError as error:
            return Outcome(theirs, None, str(error), same_as_base=same)


def _reference(folder: Path) -> Any:
    """Return transformers' model of a config with weights of its own making; None where it cannot make one."""
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            auto: Any = transformers.AutoModelForCausalLM
            own = getattr(transformers, config.architectures[0])
            make = auto.from_config if type(config) in auto._model_mapping else own._from_config
            return make(config, attn_implementation="eager").eval()
    except Exception:
        return None


@torch.inference_mode()
def _logits(model: Any) -> torch.Tensor | None:
    try:
        given: torch.Tensor = model(_TOKENS[None], use_cache=False).logits[0].float()
    except Exception:
        return None
    return given if given.isfinite().all() else None


def _saved(model: Any, folder: Path) -> bool:
    """Save a model as its family's checkpoints are; return False where transformers cannot."""
    transformers.utils.logging.disable_progress_bar()
    try:
        model.save_pretrained(folder, save_original_format=True)
    except RuntimeError:
        return False
    return True


def _fill(model: Any) -> None:
    """Give every weight a value that counts."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                scale, middle = (0.2, 1.0) if "norm" in name else (0.3, 0.0)
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale + middle)


def changes(architecture: str, fields: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Yield every change of a field, for fields that come with the source of their default."""
    base = base_of(architecture)
    for name, default in sorted(fields.items()):
        value = base.get(name, _literal(default))
        for other in values_of(name, value):
            if (name in base or other is not LEFT_OUT) and not (name in base and _same(other, base[name])):
                yield name, other


def rope_changes(architecture: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what is changed in a rotation of each type, and the config that has it."""
    base = base_of(architecture)
    for kind, keys in ROPES.items():
        rope = {"rope_type": kind, "rope_theta": 100.0, **keys}
        yield kind, base | {"rope_parameters": rope}
        yield (
            f"{kind} in the older form",
            changed(base, "rope_parameters", LEFT_OUT)
            | {
                "rope_theta": 100.0,
                "rope_scaling": {"type": kind, **keys},
            },
        )
        for key, value in keys.items():
            for other in values_of(key, value):
                if isinstance(value, list):
                    continue
                yield f"{kind} {key}", base | {"rope_parameters": changed(rope, key, other)}
        yield f"{kind} attention_factor", base | {"rope_parameters": rope | {"attention_factor": 0.7}}
        yield f"{kind} mrope_section", base | {"rope_parameters": rope | {"mrope_section": [1, 1, 2]}}


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def _literal(source: str) -> Any:
    import ast

    try:
        return ast.literal_eval(source)
    except (ValueError, SyntaxError):
        return None
