"""Granite as it is served: chunks beside decodes, through a worker, against transformers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from packages.scheduler.tests.models.families.test_families import Paged, load, some_tokens
from packages.scheduler.tests.models.test_hugging_face import assert_alike, expected, generate, options
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.models.registry import build_model
from tercet.scheduler.models.weights.weights import load_weights

Checkpoints = Callable[[str], Path]


@pytest.mark.parametrize("backend", ["torch_native", "auto"])
def test_a_worker_says_what_transformers_says(backend: str, checkpoints: Checkpoints) -> None:
    worker = TpModelWorker(options(checkpoints("granite"), attention_backend=backend))
    actual = generate(worker, 16)
    worker.close()
    assert_alike(actual, expected(checkpoints("granite"), 16))


@pytest.mark.parametrize(
    "changes", [{"embedding_scale": 3.0}, {"rms_norm_eps": 0.1}, {"attention_scale": None}, {"logit_divisor": 1.0}]
)
def test_every_multiplier_counts(changes: dict[str, Any], checkpoints: Checkpoints) -> None:
    directory, tokens = checkpoints("granite"), some_tokens(41, 1)
    model = load(directory)
    plain = build_model(replace(model.config, **changes))
    load_weights(plain, directory)
    [right], [wrong] = Paged(model, 1).step((0, tokens)), Paged(plain, 1).step((0, tokens))
    assert (right - wrong).abs().max() > 0.1
