"""Phi-3 and Phi-4 as they are served: chunks beside decodes, through a worker, against transformers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from packages.scheduler.tests.models.families.test_families import Paged, load, some_tokens
from packages.scheduler.tests.models.families.test_families import expected as expected_logits
from packages.scheduler.tests.models.test_hugging_face import assert_alike, expected, generate, options
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.model_files import ModelError
from tercet.scheduler.models.layers.linear import Linear
from tercet.scheduler.models.registry import build_model, load_config
from tercet.scheduler.models.weights.weights import load_weights

Checkpoints = Callable[[str], Path]

SHORT = [list(range(30, 49)), [7, 200, 45]]
"""With what is said after them, no longer than the context that `phi3_longrope` was trained for."""
BACKENDS = pytest.mark.parametrize("backend", ["torch_native", "auto"])


@BACKENDS
def test_a_worker_says_what_transformers_says(backend: str, checkpoints: Checkpoints) -> None:
    worker = TpModelWorker(options(checkpoints("phi3"), attention_backend=backend))
    actual = generate(worker, 16)
    worker.close()
    assert_alike(actual, expected(checkpoints("phi3"), 16))


@BACKENDS
def test_a_long_context_has_long_factors(backend: str, checkpoints: Checkpoints) -> None:
    """From the first token on: only the prompt that is longer than those of training is alike in transformers."""
    worker = TpModelWorker(options(checkpoints("phi3_longrope"), attention_backend=backend))
    actual = generate(worker, 16)
    worker.close()
    wanted = expected(checkpoints("phi3_longrope"), 16)
    assert_alike(actual[:1], wanted[:1])
    assert [score for _, score in actual[1]] != pytest.approx([score for _, score in wanted[1]], abs=1e-2)


@BACKENDS
def test_a_context_of_training_has_short_factors(backend: str, checkpoints: Checkpoints) -> None:
    """As transformers takes them for texts of that length."""
    directory = checkpoints("phi3_longrope")
    worker = TpModelWorker(options(directory, attention_backend=backend, context_length=32))
    assert worker.capacity.context_length == 32
    actual = generate(worker, 12, prompts=SHORT)
    worker.close()
    assert_alike(actual, expected(directory, 12, prompts=SHORT))


@torch.inference_mode()
def test_the_border_is_the_length_of_training(checkpoints: Checkpoints, reference: Callable[..., Any]) -> None:
    directory, tokens = checkpoints("phi3_longrope"), some_tokens(32, 1)
    exact = expected_logits(reference(directory), tokens)
    for length, alike in ((32, True), (33, False)):
        model = build_model(replace(load_config(directory), context_length=length))
        load_weights(model, directory)
        [logits] = Paged(model, 1).step((0, tokens))
        assert ((logits - exact).abs().max() < 1e-4) == alike


def test_what_is_not_rotated_counts(checkpoints: Checkpoints) -> None:
    """The checkpoint tells heads of which a part is rotated from others, and rows in order from those that are not."""
    directory, tokens = checkpoints("phi3_longrope"), some_tokens(41, 1)
    model, other = load(directory), load(directory)
    [right] = Paged(model, 1).step((0, tokens))
    for module in other.modules():
        if isinstance(module, Linear) and module.order is not None:
            module.weight.data = module.weight.data[torch.argsort(module.order)]
    [wrong] = Paged(other, 1).step((0, tokens))
    assert (right - wrong).abs().max() > 0.1


def test_a_tensor_that_is_missing_is_named_as_it_is_stored(checkpoints: Checkpoints, tmp_path: Path) -> None:
    tensors = load_file(checkpoints("phi3") / "model.safetensors")
    del tensors["model.layers.1.self_attn.qkv_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((checkpoints("phi3") / "config.json").read_text())
    with pytest.raises(ModelError, match=r"missing: model\.layers\.1\.self_attn\.qkv_proj\.weight$"):
        load(tmp_path)
