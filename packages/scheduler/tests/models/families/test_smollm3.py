"""SmolLM3 as it is served: chunks beside decodes, through a worker, against transformers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from packages.scheduler.tests.models.families.test_families import Paged, load, some_tokens
from packages.scheduler.tests.models.test_hugging_face import assert_alike, expected, generate, options
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.models.registry import build_model
from tercet.scheduler.models.weights.weights import load_weights

Checkpoints = Callable[[str], Path]


@pytest.mark.parametrize("backend", ["torch_native", "auto"])
@pytest.mark.parametrize("name", ["smollm3", "smollm3_sliding"])
def test_a_worker_says_what_transformers_says(name: str, backend: str, checkpoints: Checkpoints) -> None:
    worker = TpModelWorker(options(checkpoints(name), attention_backend=backend))
    actual = generate(worker, 16)
    worker.close()
    assert_alike(actual, expected(checkpoints(name), 16))


@pytest.mark.parametrize("other", [frozenset(), frozenset([0]), frozenset([0, 1, 2])])
def test_it_counts_which_layers_rotate(other: frozenset[int], checkpoints: Checkpoints) -> None:
    directory, tokens = checkpoints("smollm3"), some_tokens(41, 1)
    model = load(directory)
    assert model.config.unrotated == {1}
    changed = build_model(replace(model.config, unrotated=other))
    load_weights(changed, directory)
    [right], [wrong] = Paged(model, 1).step((0, tokens)), Paged(changed, 1).step((0, tokens))
    assert (right - wrong).abs().max() > 0.1
