"""Configs of text models within others, which may leave out the defaults of transformers."""

from typing import Any

import pytest
import transformers

from tercet.scheduler.models.registry import parse_config

VICUNA = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32_064}
NEMO = {"model_type": "mistral", "head_dim": 128, "hidden_size": 5120, "num_hidden_layers": 40, "sliding_window": None}


@pytest.mark.parametrize("text", [VICUNA, NEMO, {"model_type": "llama"}, {"model_type": "mistral"}])
def test_defaults_of_text_models_are_those_of_transformers(text: dict[str, Any]) -> None:
    found = parse_config({"architectures": ["LlavaForConditionalGeneration"], "text_config": text}, {})
    expected = transformers.LlavaConfig(text_config=text).text_config
    assert {
        "hidden_size": found.hidden_size,
        "intermediate_size": found.intermediate_size,
        "num_hidden_layers": found.layers,
        "num_attention_heads": found.heads,
        "num_key_value_heads": found.kv_heads,
        "max_position_embeddings": found.context_length,
        "vocab_size": found.vocab_size,
        "rms_norm_eps": found.rms_norm_eps,
        "tie_word_embeddings": found.tie_word_embeddings,
    }.items() <= expected.to_dict().items()
