"""Heads in another order, against the definition of a rotation of their first elements only."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from packages.scheduler.tests.models.families.test_families import Paged, some_tokens
from tercet.kernels.ops.rope import rope_cache
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.layers.decoder import CausalLM
from tercet.scheduler.models.layers.layers import Rotary
from tercet.scheduler.models.layers.rotation import head_order, pad_to_heads
from tercet.scheduler.models.registry import build_model, load_config
from tercet.scheduler.models.weights.weights import load_weights


def loaded(config: ModelConfig, directory: Path) -> CausalLM:
    model = build_model(config)
    load_weights(model, directory)
    return model


@pytest.mark.parametrize("name", ["phi3", "qwen2", "qwen3", "olmoe"])
def test_biases_and_norms_follow_their_rows(name: str, checkpoints: Callable[[str], Path]) -> None:
    """Weights in the checkpoint's order are rotated by a table that ends before the head does, as torch can."""
    config = load_config(checkpoints(name))
    config = replace(config, rope=replace(config.rope, share=0.5))
    model = loaded(config, checkpoints(name))
    plain = loaded(replace(config, rope=replace(config.rope, share=1.0)), checkpoints(name))
    for module in plain.modules():
        if isinstance(module, Rotary):
            module.cache = rope_cache(config.context_length, config.rotary_dim, config.rope.theta)
    tokens = some_tokens(41, 1)
    [actual], [expected] = Paged(model, 1).step((0, tokens)), Paged(plain, 1).step((0, tokens))
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def test_a_head_that_is_rotated_whole_stays_as_it_is() -> None:
    assert head_order(8, 8) is None
    table = rope_cache(5, 8, 1e4)
    assert torch.equal(pad_to_heads(table, 8), table)


def test_elements_that_are_rotated_together_lie_half_a_head_apart() -> None:
    order = head_order(10, 6)
    assert order is not None
    assert order.tolist() == [0, 1, 2, 6, 7, 3, 4, 5, 8, 9]
    pairs = head_order(10, 6, interleaved=True)
    assert pairs is not None
    assert pairs.tolist() == [0, 2, 4, 6, 7, 1, 3, 5, 8, 9]
    cos, sin = pad_to_heads(rope_cache(4, 6, 1e4), 10).chunk(2, dim=1)
    assert torch.equal(cos[:, 3:], torch.ones(4, 2))
    assert not sin[:, 3:].any()
