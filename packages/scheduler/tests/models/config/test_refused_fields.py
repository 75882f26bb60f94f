"""Fields of one family's config that would change its answers, and are not honoured."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tercet.scheduler.model_files import ModelError
from tercet.scheduler.models.registry import parse_config

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("mimo_v2", "rope_scaling", YARN),
        ("mimo_v2", "swa_rope_theta", 5e4),
        ("mimo_v2", "layernorm_epsilon", 1e-6),
        ("mimo_v2", "scoring_func", "softmax"),
        ("mimo_v2", "add_full_attention_sink_bias", True),
        ("gemma4", "rope_scaling", YARN),
        ("gemma4", "vocab_size_per_layer_input", 100),
        ("mistral4", "head_dim", 6),
        ("gemma3n", "altup_active_idx", 3),
        ("gemma3n", "activation_sparsity_pattern", [0.5]),
        ("gemma3n", "activation_sparsity_pattern", [1.0] * 6),
        ("gemma3n", "intermediate_size", [88, 40]),
        ("gemma3n", "num_kv_shared_layers", 6),
    ],
)
def test_a_field_that_would_change_answers_is_refused(
    family: str, field: str, value: Any, checkpoints: Callable[[str], Path]
) -> None:
    given = json.loads((checkpoints(family) / "config.json").read_text())
    parse_config(given, {})
    with pytest.raises(ModelError, match=field):
        parse_config({**given, field: value}, {})


@pytest.mark.parametrize(("field", "value"), [("rope_theta", 1e7), ("partial_rotary_factor", 1.0)])
def test_a_published_rotation_of_mimo_is_honoured_or_refused(
    field: str, value: float, checkpoints: Callable[[str], Path]
) -> None:
    given = json.loads((checkpoints("mimo_v2") / "config.json").read_text())
    del given["rope_parameters"]
    with pytest.raises(ModelError, match=field):
        parse_config({**given, field: value}, {})
