import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from packages.scheduler.tests.conftest import ALL, NEW
from tercet.kernels.ops.rope import RopeScaling
from tercet.scheduler.model_files import ModelError
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.config.rope_config import RopeConfig
from tercet.scheduler.models.registry import load_config, parse_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"]}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"]}
MIXTRAL = {**LLAMA, "architectures": ["MixtralForCausalLM"]}
QWEN2_MOE = {**LLAMA, "architectures": ["Qwen2MoeForCausalLM"]}
QWEN3_MOE = {**LLAMA, "architectures": ["Qwen3MoeForCausalLM"]}
PHI3 = {**LLAMA, "architectures": ["Phi3ForCausalLM"]}
OLMOE = {**LLAMA, "architectures": ["OlmoeForCausalLM"]}
_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
SLIDING = {"use_sliding_window": True, "sliding_window": 9}


def parse(config: dict[str, Any], **changes: Any) -> ModelConfig:
    return parse_config({**config, **changes}, {})


def test_fields_left_out_mean_what_they_mean_to_transformers() -> None:
    config = parse(LLAMA)
    assert (config.kv_heads, config.head_dim) == (4, 16)
    assert config.rope == RopeConfig(theta=10000.0, scaling=None)
    assert (config.rms_norm_eps, config.dtype, config.eos_token_ids) == (1e-6, torch.float32, ())
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (False, False, False)
    assert parse(QWEN3).head_dim == 128
    seed_oss = parse(LLAMA, architectures=["SeedOssForCausalLM"])
    glm, ernie = (parse(LLAMA, architectures=[f"{name}ForCausalLM"]) for name in ("Glm", "Ernie4_5"))
    assert (glm.rope, glm.head_dim) == (RopeConfig(theta=1e4, share=0.5, interleaved=True), 128)
    assert (glm.rms_norm_eps, glm.attention_bias) == (1.5625e-7, True)
    assert (ernie.rope, ernie.head_dim) == (RopeConfig(theta=5e5, interleaved=True), 128)
    assert (ernie.rms_norm_eps, ernie.attention_bias, ernie.tie_word_embeddings) == (1e-5, False, True)
    assert (seed_oss.head_dim, seed_oss.attention_bias, seed_oss.output_bias, seed_oss.mlp_bias) == (128, 1, 0, 0)
    assert parse(MISTRAL).windows == (4096,) * 3


@pytest.mark.parametrize("name", [name for name in ALL if name not in NEW])
def test_both_forms_of_a_checkpoint_say_the_same(name: str, checkpoints: Callable[[str], Path]) -> None:
    family = checkpoints(name)
    old = checkpoints(f"{family.name}/old")
    before, after = (json.loads((path / "config.json").read_text()) for path in (old, family))
    assert "rope_theta" in before
    assert "rope_parameters" in after
    assert load_config(old) == load_config(family)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (LLAMA | SLIDING, (0, 0, 0)),
        (MISTRAL | {"sliding_window": 5}, (5, 5, 5)),
        (MISTRAL | {"sliding_window": None}, (0, 0, 0)),
        (QWEN2 | SLIDING | {"use_sliding_window": False}, (0, 0, 0)),
        (QWEN2 | {"sliding_window": 9}, (0, 0, 0)),
        (QWEN2 | SLIDING, (0, 0, 0)),  # max_window_layers is 28 when left out
        (QWEN2 | SLIDING | {"max_window_layers": 2}, (0, 0, 9)),
        (QWEN3 | SLIDING | {"max_window_layers": 0}, (9, 9, 9)),
        (MIXTRAL, (0, 0, 0)),
        (MIXTRAL | {"sliding_window": 5}, (5, 5, 5)),
        (QWEN3_MOE | SLIDING, (9, 9, 9)),
        (QWEN3_MOE | SLIDING | {"use_sliding_window": False}, (0, 0, 0)),
        (QWEN2_MOE | SLIDING, (9, 0, 9)),
        (QWEN2_MOE | SLIDING | {"max_window_layers": 2}, (9, 0, 0)),
        (MISTRAL | {"sliding_window": 5, "layer_types": _TYPES}, (5, 0, 5)),
        (MISTRAL | {"sliding_window": None, "layer_types": _TYPES}, (0, 0, 0)),
        (MIXTRAL | {"sliding_window": 5, "layer_types": _TYPES}, (5, 5, 5)),
        (QWEN2 | SLIDING | {"sliding_window": None, "max_window_layers": 0}, (0, 0, 0)),
        (QWEN3 | SLIDING | {"layer_types": ["sliding_attention", "attention", "attention"]}, (9, 0, 0)),
        (PHI3, (0, 0, 0)),
        (PHI3 | {"sliding_window": 5}, (5, 5, 5)),
        (QWEN3 | SLIDING | {"layer_types": _TYPES}, (9, 0, 9)),
    ],
)
def test_windows(config: dict[str, Any], windows: tuple[int, ...]) -> None:
    parsed = parse(config)
    assert tuple(parsed.window_of(layer) for layer in range(3)) == windows


def test_llama3_scaling_in_every_form() -> None:
    values = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    expected = RopeConfig(theta=5e5, scaling=RopeScaling(type="llama3", **values))  # type: ignore[arg-type]
    new = {"rope_type": "llama3", "rope_theta": 5e5, **values}
    assert parse(LLAMA, rope_theta=5e5, rope_scaling={"rope_type": "llama3", **values}).rope == expected
    assert parse(LLAMA, rope_theta=5e5, rope_scaling={"type": "llama3", **values}).rope == expected
    assert parse(LLAMA, rope_parameters=new).rope == expected
    assert parse(QWEN3, rope_parameters={"full_attention": new, "sliding_attention": new}).rope == expected


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"full_attention": {"rope_theta": 1.0}, "sliding_attention": {"rope_theta": 2.0}}, "rotate differently"),
        ({"full_attention": {"rope_theta": 1.0}, "sliding_attention": None}, "must say how layers rotate"),
        ({"full_attention": {"rope_theta": 1.0}, "rope_theta": 2.0}, "must say how layers rotate"),
    ],
)
def test_rotations_by_type_of_layer_that_are_not_alike_are_refused(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=f"rope_parameters: .*{message}"):
        parse(QWEN3, rope_parameters=rope)


def test_yarn_stretches_the_context() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert parse(QWEN2, rope_scaling=yarn).context_length == 512
    assert parse(QWEN2, rope_scaling={**yarn, "original_max_position_embeddings": 32}).context_length == 128


def test_longrope_in_every_form() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2] * 4}
    expected = RopeConfig(
        theta=1e4,
        scaling=RopeScaling(
            type="longrope",
            factor=4.0,
            original_max_position_embeddings=32,
            short_factor=(1.0,) * 4,
            long_factor=(2.0,) * 4,
        ),
        share=0.5,
    )
    outside = {"original_max_position_embeddings": 32, "partial_rotary_factor": 0.5}
    for name in ("longrope", "su", "yarn"):  # "yarn" was Phi-3's own word for it
        config = parse(PHI3, rope_scaling={"type": name, **factors}, **outside)
        assert (config.rope, config.rotary_dim, config.context_length) == (expected, 8, 128)
    inside = {"rope_type": "longrope", "partial_rotary_factor": 0.5, **factors}
    assert parse(PHI3, rope_parameters=inside, original_max_position_embeddings=32).rope == expected
    assert parse(PHI3, rope_parameters=inside).rope.scaling == replace(
        expected.scaling or RopeScaling(), original_max_position_embeddings=4096, factor=128 / 4096
    )


def test_multipliers_that_are_left_out_are_1() -> None:
    config = parse(LLAMA, architectures=["GraniteForCausalLM"])
    multipliers = config.embedding_scale, config.attention_scale, config.logit_divisor
    assert (multipliers, config.rms_norm_eps) == ((1.0, 1.0, 1.0), 1e-6)


SMOLLM3 = {**LLAMA, "architectures": ["SmolLM3ForCausalLM"]}


@pytest.mark.parametrize(
    ("changes", "unrotated", "windows"),
    [
        ({}, set(), (0, 0, 0)),
        ({"no_rope_layer_interval": 2}, {1}, (0, 0, 0)),
        ({"no_rope_layer_interval": 1, "no_rope_layers": [1, 1, 0]}, {2}, (0, 0, 0)),
        ({"no_rope_layer_interval": 2, **SLIDING}, {1}, (0, 9, 0)),
        ({"no_rope_layers": [0, 1, 1], **SLIDING, "layer_types": ["sliding_attention"] * 3}, {0}, (9, 9, 9)),
        ({"sliding_window": 9, "layer_types": ["sliding_attention"] * 3}, set(), (0, 0, 0)),
    ],
)
def test_layers_that_do_not_rotate(changes: dict[str, Any], unrotated: set[int], windows: tuple[int, ...]) -> None:
    config = parse(SMOLLM3, **changes)
    assert (set(config.unrotated), config.windows) == (unrotated, windows)
    assert (config.rope.theta, config.tie_word_embeddings, config.head_dim) == (2e6, True, 16)
    assert not parse(LLAMA, no_rope_layer_interval=1).unrotated


@pytest.mark.parametrize("said", [[1, 0], [1, 0, 2], "101", 3])
def test_nonsense_of_what_does_not_rotate_is_refused_by_name(said: Any) -> None:
    with pytest.raises(ModelError, match="no_rope_layers: must say 0 or 1 for each of the 3 layers"):
        parse(SMOLLM3, no_rope_layers=said)


def test_dynamic_scaling_ends_where_it_would_begin() -> None:
    config = parse(LLAMA, rope_scaling={"type": "dynamic", "factor": 4.0})
    assert (config.context_length, config.rope.scaling) == (128, None)


@pytest.mark.parametrize(
    ("generation", "own", "ids"),
    [({}, 7, (7,)), ({}, [7, 8, 7], (7, 8)), ({"eos_token_id": [1, 2]}, 7, (1, 2)), ({"eos_token_id": None}, 0, (0,))],
)
def test_end_tokens(generation: dict[str, Any], own: Any, ids: tuple[int, ...]) -> None:
    assert parse_config({**LLAMA, "eos_token_id": own}, generation).eos_token_ids == ids


def test_generation_config_is_read_from_the_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 1}))
    assert load_config(tmp_path).eos_token_ids == (1,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert load_config(tmp_path).eos_token_ids == (3, 4)


@pytest.mark.parametrize("value", [False, None])
def test_a_bidirectional_model_generates_nothing(value: bool | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "is_causal": value}))
    with pytest.raises(ModelError, match="is_causal: "):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "is_causal": True}))
    assert load_config(tmp_path).causal


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (OLMOE, {"clip_qkv": 8.0}, "clip_qkv: 8.0 is not supported: .* clipped"),
        (OLMOE, {"sliding_window": 8}, "sliding_window: 8 is not supported"),
        (LLAMA, {"per_layer_config": {"1": {"intermediate_size": 8}}}, "per_layer_config: .* different shapes"),
        (LLAMA, {"is_encoder_decoder": True}, "is_encoder_decoder: True is not supported"),
        (LLAMA, {"kv_sharing_modes": ["reuse"]}, "kv_sharing_modes: .* share keys"),
        (MIXTRAL, {"num_experts": 4, "num_local_experts": 8}, "num_experts: is 4 and 8: it is also called num_local"),
        ({**LLAMA, "architectures": ["Gemma2ForCausalLM"]}, {"use_bidirectional_attention": True}, "use_bidirec"),
        ({**LLAMA, "architectures": ["DeepseekV3ForCausalLM"]}, {"head_dim": 32}, "head_dim: 32 is not qk_rope"),
        ({**LLAMA, "architectures": ["DeepseekV3ForCausalLM"]}, {"rope_interleave": None}, "rope_interleave: null"),
    ],
)
def test_what_would_change_an_answer_is_refused_by_name(
    config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        parse(config, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (LLAMA, {"hidden_act": "swish"}),
        (LLAMA, {"clip_qkv": 8.0, "scoring_func": "sigmoid", "hidden_activation": "relu", "use_qk_norm": "yes"}),
        (LLAMA, {"is_encoder_decoder": False, "per_layer_config": {}, "kv_sharing_modes": None}),
        ({**LLAMA, "architectures": ["GptOssForCausalLM"]}, {"hidden_act": "gelu"}),
        ({**LLAMA, "architectures": ["Gemma2ForCausalLM"]}, {"hidden_activation": "gelu_new"}),
        (MISTRAL, {"attention_bias": True, "mlp_bias": True}),
        (OLMOE, {"clip_qkv": None}),
    ],
)
def test_what_changes_nothing_is_accepted(config: dict[str, Any], changes: dict[str, Any]) -> None:
    assert parse(config, **changes) == parse(config)


def test_a_yarn_mscale_of_0_is_none() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert parse(LLAMA, rope_scaling={**yarn, "mscale": 0, "mscale_all_dim": 0}) == parse(LLAMA, rope_scaling=yarn)


def test_the_other_name_of_a_field_counts() -> None:
    config = parse({**LLAMA, "architectures": ["DeepseekV3ForCausalLM"]}, num_local_experts=16, first_k_dense_replace=0)
    assert config.moe is not None
    assert config.moe.experts == 16


def test_dtypes() -> None:
    assert parse(LLAMA, torch_dtype="bfloat16").dtype == torch.bfloat16
    assert parse(LLAMA, dtype="float16", torch_dtype="bfloat16").dtype == torch.float16
    assert parse_config({**LLAMA, "dtype": "float16"}, {}, "float32").dtype == torch.float32
    with pytest.raises(ModelError, match="dtype 'int8'"):
        parse_config(LLAMA, {}, "int8")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": None}, "architectures: must name"),
        ({"architectures": [[]]}, "architectures: "),
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "'GPT2LMHeadModel' is not one of .*LlamaForCausalLM, .*Qwen3ForCausalLM",
        ),
        ({"auto_map": {"AutoModel": "evil.Model"}}, "auto_map: .* never runs a model's code"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config\.bits: "),
        ({"hidden_size": None}, "hidden_size: is missing"),
        ({"hidden_size": "64"}, "hidden_size: '64' is not a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: 0 is not"),
        ({"num_hidden_layers": True}, "num_hidden_layers: True is not"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: 1000000000 are more than"),
        ({"vocab_size": 2**40}, "vocab_size: "),
        ({"num_attention_heads": -4}, "num_attention_heads: -4"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide the 4"),
        ({"head_dim": 15}, "head_dim: 15 is odd"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: 0 is not a positive number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: nan"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: 'yes'"),
        ({"eos_token_id": "</s>"}, "eos_token_id: '</s>'"),
        ({"eos_token_id": [1, -1]}, "eos_token_id: "),
        ({"torch_dtype": "float8"}, "dtype 'float8'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: "),
        ({"rope_theta": -1}, "rope_theta: -1"),
        ({"rope_scaling": {"type": "bent"}}, "rope_scaling: type 'bent'"),
        ({"rope_scaling": {"type": ["bent"]}}, "rope_scaling: type .* is not supported"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_scaling.short_factor: is missing"),
        ({"rope_scaling": {"type": "su", "short_factor": [1, 0]}}, "rope_scaling.short_factor: is not a list of pos"),
        (
            {"rope_scaling": {"type": "su", "short_factor": [1], "long_factor": [2]}},
            "short_factor: has 1 numbers for 8",
        ),
        (
            {"rope_scaling": {"type": "default", "mrope_section": [1, 1]}},
            "rope_scaling.mrope_section: positions of images, .* not supported",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: is missing"),
        ({"rope_scaling": [1]}, "rope_scaling: is not an object"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 1}},
            "rope_parameters.high_freq_factor: 1.0 is not above low_freq_factor 4.0",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters: must say how layers rotate"),
        ({"rope_parameters": {"full_attention": None}}, "rope_parameters: must say how layers rotate"),
    ],
)
def test_nonsense_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        parse(LLAMA, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("share", [1.5, 0.05, 0.2])
def test_a_share_of_a_head_that_is_no_pairs_is_refused_by_name(share: float) -> None:
    with pytest.raises(ModelError, match=r"^config\.json: partial_rotary_factor: "):
        parse(PHI3, partial_rotary_factor=share)


@pytest.mark.parametrize("name", ["Phi3", "Glm", "Ernie4_5", "SeedOss"])
def test_code_that_says_what_is_written_here_is_passed_over(name: str) -> None:
    config = parse(LLAMA, architectures=[f"{name}ForCausalLM"], auto_map={"AutoModelForCausalLM": "evil.Model"})
    assert config.architecture == f"{name}ForCausalLM"


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["full_attention"]},
        {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
        {"layer_types": [[], [], []]},
        {"sliding_window": 0},
        {"max_window_layers": "2"},
    ],
)
def test_nonsense_windows_are_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=next(iter(changes))):
        parse(QWEN2 | SLIDING, **changes)


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff"])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelError, match=r"config\.json"):
        load_config(tmp_path)
    with pytest.raises(ModelError, match="does not exist"):
        load_config(tmp_path / "nowhere")


@pytest.mark.parametrize("config", [MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE])
def test_fields_left_out_of_a_mixture_mean_what_they_mean_to_transformers(config: dict[str, Any]) -> None:
    import transformers

    name = config["architectures"][0].removesuffix("ForCausalLM")
    theirs = getattr(transformers, f"{name}Config")()
    moe = parse(config, intermediate_size=theirs.intermediate_size).moe
    assert moe is not None
    assert (moe.experts, moe.routing.top_k) == (theirs.num_experts, theirs.num_experts_per_tok)
    assert moe.intermediate_size == getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
    assert moe.shared_size == getattr(theirs, "shared_expert_intermediate_size", 0)
    assert moe.routing.renormalize is getattr(theirs, "norm_topk_prob", True)
    assert parse(config).rms_norm_eps == theirs.rms_norm_eps
    assert parse(config).rope.theta == theirs.rope_parameters["rope_theta"]
    assert parse(config).attention_bias is getattr(theirs, "qkv_bias", False)


def test_which_layers_have_experts() -> None:
    def layers(**changes: Any) -> tuple[bool, ...]:
        moe = parse(QWEN3_MOE, **changes).moe
        return moe.layers if moe else ()

    assert layers() == (True, True, True)
    assert layers(decoder_sparse_step=2) == (False, True, False)
    assert layers(mlp_only_layers=[0, 2]) == (False, True, False)
    assert layers(decoder_sparse_step=2, mlp_only_layers=[1]) == ()
    assert parse(LLAMA, num_experts=4).moe is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok: 5 is more than the 4 experts"),
        ({"num_experts": 0}, "num_experts: 0 is not a positive integer"),
        ({"mlp_only_layers": "1"}, "mlp_only_layers: '1' is not a list of layers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step: 0"),
        ({"norm_topk_prob": 1}, "norm_topk_prob: 1 is neither"),
    ],
)
def test_experts_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse(QWEN3_MOE, **changes)


def test_how_much_minimax_rotates() -> None:
    config = {**LLAMA, "architectures": ["MiniMaxM2ForCausalLM"], "head_dim": 16, "rotary_dim": 8}
    assert parse(config).rotary_dim == 8
    assert parse(config, partial_rotary_factor=0.25).rotary_dim == 4
    assert parse({**LLAMA, "rotary_dim": 8}).rotary_dim == 16
