"""The kernels' rotary tables against those of transformers, to the bit."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from tercet.kernels.ops.rope import RopeScaling, apply_rope, rope_cache

LENGTH, HEAD_DIM = 300, 24
FACTORS = {"short_factor": [1 + 0.01 * i for i in range(12)], "long_factor": [1.5 + 3 * i for i in range(12)]}

KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 75},
    "yarn of DeepSeek": {
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "yarn told its factor": {
        "factor": 4.0,
        "original_max_position_embeddings": 75,
        "attention_factor": 1.37,
        "truncate": False,
    },
    "longrope": {"original_max_position_embeddings": 75, **FACTORS},
    "longrope of what it was trained for": {"factor": 4.0, "original_max_position_embeddings": LENGTH, **FACTORS},
    "longrope told its factor": {"attention_factor": 1.19, "original_max_position_embeddings": 75, **FACTORS},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal(kind: str, theta: float, dtype: torch.dtype) -> None:
    name = kind.split(maxsplit=1)[0]
    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        rope_parameters={"rope_type": name, "rope_theta": theta, **KINDS[kind]},
    )
    q, k = torch.randn(LENGTH, 4, HEAD_DIM).to(dtype), torch.randn(LENGTH, 2, HEAD_DIM).to(dtype)
    positions = torch.arange(LENGTH)
    cos, sin = LlamaRotaryEmbedding(config)(q, positions[None])
    expected = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    table = rope_cache(LENGTH, HEAD_DIM, theta, RopeScaling(type=name, **{"factor": 4.0, **KINDS[kind]}))
    for ours, theirs in zip(apply_rope(q, k, positions, table), expected, strict=True):
        assert torch.equal(ours, theirs[0].transpose(0, 1))
