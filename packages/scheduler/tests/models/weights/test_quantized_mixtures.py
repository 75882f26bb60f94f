"""Quantised checkpoints whose experts are routed by corrected scores, beside the weights they stand for."""

from pathlib import Path
from typing import Any

import pytest
import torch

from packages.scheduler.tests.loaded_model import load, logits
from tercet.kernels.native.library import load_library, missing_library
from tercet.scheduler.models.layers.moe import MixtureOfExperts
from tercet.scheduler.models.native_linear import use_native_projections
from tercet.scheduler.testing.quantized_checkpoints import KINDS, Grain, write_checkpoint

LAYERS = 2
CONFIG: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "first_k_dense_replace": 0,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "dtype": "float32",
}


def write(kind: str, directory: Path) -> Path:
    """A checkpoint of a kind, and beside it the same weights without quantisation. Returns the latter."""
    chance = torch.Generator().manual_seed(1)
    names = [f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in range(LAYERS)]
    corrections = {name: torch.randn(8, generator=chance) / 10 for name in names}
    return write_checkpoint(
        kind, directory, CONFIG, Grain(group=32, block=(16, 32)), full=("mlp.gate",), beside=corrections
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_equals_that_of_the_full_weights(kind: str, tmp_path: Path) -> None:
    expected = logits(load(write(kind, tmp_path / "model")))
    for dequantized in (False, True):
        model = load(tmp_path / "model", dequantized=dequantized)
        for layer in model.model.layers:
            mixture = layer.mlp
            assert isinstance(mixture, MixtureOfExperts)
            assert mixture.shared_experts is not None
            linears = (mixture.experts.down_proj, mixture.shared_experts.down_proj)
            assert [linear.quantized is None for linear in linears] == [dequantized] * 2
            assert mixture.gate.quantized is None
        torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(bool(missing_library()), reason=missing_library())
@pytest.mark.parametrize("kind", ["awq", "deepseek"])
def test_native_projections_of_it_give_the_same(kind: str, tmp_path: Path) -> None:
    expected = logits(load(write(kind, tmp_path / "model")))
    model = load(tmp_path / "model", dequantized=True)
    use_native_projections(model, load_library())
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
