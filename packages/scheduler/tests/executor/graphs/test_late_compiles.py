"""No step has to wait for a kernel to be compiled: a start has them all compiled, whatever comes later."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels are compiled by triton")

LLAMA = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "eos_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": {"model_type": "qwen3", "attention_bias": False},
    "MixtralForCausalLM": {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    "DeepseekV2ForCausalLM": {
        "model_type": "deepseek_v2",
        "num_key_value_heads": 4,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "q_lora_rank": None,
        "first_k_dense_replace": 1,
    },
}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}


KINDS: list[Any] = [
    ("Qwen3ForCausalLM", 2, {}),
    ("DeepseekV2ForCausalLM", 0, {}),
    pytest.param("Qwen3ForCausalLM", 0, {}, marks=pytest.mark.slow),
    pytest.param("MixtralForCausalLM", 0, {}, marks=pytest.mark.slow),
    pytest.param("Qwen3ForCausalLM", 0, AWQ, marks=pytest.mark.slow),
    pytest.param("MixtralForCausalLM", 0, FP8, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("architecture", "places", "quantization"), KINDS)
def test_nothing_is_compiled_while_serving(
    architecture: str, places: int, quantization: dict[str, Any], tmp_path: Path
) -> None:
    """Steps of decodes beside prompts of any length, sampled in any way, with adapters, and graphs of all buckets."""
    config = LLAMA | MODELS[architecture] | {"architectures": [architecture]}
    if quantization:  # of layers as wide as those whose inputs are cut into splits
        config |= {"quantization_config": quantization, "hidden_size": 2048}
    (tmp_path / "config.json").write_text(json.dumps(config))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("late_compiles.py")), str(tmp_path), str(places)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert not done.returncode, done.stderr
    known, *late = done.stdout.split()
    assert int(known) > 20
    assert late == []
