"""Models on transformers' modules whose masks and positions are their own: each is right or refused in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from packages.scheduler.tests.models.test_hugging_face import SHAPE, assert_alike, expected, generate, options
from tercet.scheduler.executor import loading
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.model_files import ModelError, model_identity
from tercet.scheduler.models.hugging_face import read_shape
from tercet.scheduler.models.trial_text import LONGEST

WINDOW = LONGEST + 4
"""Longer than the text of the trial."""
LONG = [[(place * 37) % 290 + 5 for place in range(WINDOW + 14)], [7, 200, 45]]
SMALL = SHAPE | {"num_hidden_layers": 2, "max_position_embeddings": 600}
EVEN = SMALL | {"num_key_value_heads": 4}
DECODER = {**EVEN, "is_decoder": True}
ROBERTA = {**DECODER, "pad_token_id": 3}


@pytest.fixture(autouse=True)
def hosted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run also models that Tercet has modules of its own for on those of transformers."""
    monkeypatch.setattr(loading, "is_ours", lambda _: False)


def build(directory: Path, architecture: str, config: str, **fields: Any) -> Path:
    """Write a random checkpoint."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = getattr(transformers, architecture)(getattr(transformers, config)(**fields))
        for parameter in model.parameters():
            if parameter.ndim == 1:
                torch.nn.init.normal_(parameter, float(parameter.detach().mean()), 0.2)
        model.save_pretrained(directory)
    return directory


OPT = {"ffn_dim": 96, "word_embed_proj_dim": 32}
PHIMOE = {"num_local_experts": 4, "sliding_window": WINDOW, "router_jitter_noise": 0.0}
RIGHT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a window that the mask alone has": ("PhimoeForCausalLM", "PhimoeConfig", {**SMALL, **PHIMOE}),
    "a window that layers know of": ("Starcoder2ForCausalLM", "Starcoder2Config", {**SMALL, "sliding_window": WINDOW}),
    "positions from the padding token on": ("RobertaForCausalLM", "RobertaConfig", ROBERTA),
    "positions from 0 on": ("BertLMHeadModel", "BertConfig", DECODER),
    "a decoder within the body": ("OPTForCausalLM", "OPTConfig", {**EVEN, **OPT}),
}


@pytest.mark.parametrize("kind", RIGHT)
def test_masks_and_positions_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    architecture, config, fields = RIGHT[kind]
    build(tmp_path, architecture, config, **fields)
    worker = TpModelWorker(options(tmp_path))
    actual = generate(worker, 4, chunk=60, prompts=LONG)
    worker.close()
    assert_alike(actual, expected(tmp_path, 4, LONG))


def test_windows_count(tmp_path: Path) -> None:
    """The prompts above do tell a model with its window from one without."""
    architecture, config, fields = RIGHT["a window that the mask alone has"]
    build(tmp_path, architecture, config, **fields)
    windowed = expected(tmp_path, 1, LONG[:1])
    changed = json.loads((tmp_path / "config.json").read_text()) | {"sliding_window": None}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    assert abs(windowed[0][0][1] - expected(tmp_path, 1, LONG[:1])[0][0][1]) > 1e-3


def test_positions_before_the_first_are_not_served(tmp_path: Path) -> None:
    build(tmp_path, "RobertaForCausalLM", "RobertaConfig", **ROBERTA | {"max_position_embeddings": 60})
    assert read_shape(tmp_path, "float32").context_length == 56
    worker = TpModelWorker(options(tmp_path))
    prompts = [LONG[0][:54], [7, 200, 45]]
    assert_alike(generate(worker, 2, prompts=prompts), expected(tmp_path, 2, prompts))
    worker.close()


LLAMA4 = {
    "attn_temperature_tuning": False,
    "attention_chunk_size": 8,
    "num_local_experts": 2,
    "intermediate_size_mlp": 96,
    "head_dim": 16,
}
LFM2 = {"layer_types": ["conv", "full_attention"]}
JAMBA = {"attn_layer_offset": 1, "attn_layer_period": 2, "num_experts": 2, "mamba_d_state": 4}
GEMMA4 = {
    "layer_types": ["sliding_attention", "full_attention"],
    "head_dim": 16,
    "global_head_dim": 32,
    "vocab_size_per_layer_input": 300,
}
BLOOM = {"hidden_size": 64, "n_layer": 1, "n_head": 4, "vocab_size": 300}
REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "an encoder": (
        "BertLMHeadModel",
        "BertConfig",
        EVEN,
        "Bert.* served: in layer 0 a token sees later tokens",
    ),
    "a decoder made bidirectional": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        SMALL | {"is_causal": False},
        "Qwen2ForCausalLM cannot be served: in layer 0 a token sees later tokens",
    ),
    "blocks": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        SMALL | LLAMA4,
        "layer_types: chunked_attention is not supp",
    ),
    "scales by place": (
        *("Llama4ForCausalLM", "Llama4TextConfig"),
        SMALL | LLAMA4 | {"attn_temperature_tuning": True, "no_rope_layers": [0, 0]},
        "attn_temperature_tuning: queries that are scaled by the place in a step",
    ),
    "masks of its own": (
        "DogeForCausalLM",
        "DogeConfig",
        SMALL,
        "DogeForCausalLM cannot be served: in layer 0 the mask is changed by the layer",
    ),
    "ALiBi": ("BloomForCausalLM", "BloomConfig", BLOOM, "'BloomForCausalLM' is not supported"),
    "a convolution": ("Lfm2ForCausalLM", "Lfm2Config", SMALL | LFM2, "layer_types: conv is not supported"),
    "recurrent layers": (
        *("JambaForCausalLM", "JambaConfig"),
        SMALL | JAMBA,
        "'JambaForCausalLM' is not supported: it cannot be given another attention",
    ),
    "two attentions in a layer": (
        "DiffLlamaForCausalLM",
        "DiffLlamaConfig",
        SMALL,
        r"DiffLlamaForCausalLM attends in layers \[0, 0, 1, 1\] of 2",
    ),
    "layers that differ": (
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        SMALL | GEMMA4,
        "config.json: head_dim: layers that differ in it are not supported",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_right_is_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    architecture, config, fields, line = REFUSED[kind]
    build(tmp_path, architecture, config, **fields)
    with pytest.raises(ModelError, match=line) as caught:
        TpModelWorker(options(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_an_adapter_beside_the_weights_is_not_merged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """transformers would merge it, and the fingerprint of the weights would not say so."""
    architecture, config, fields = RIGHT["a window that layers know of"]
    build(tmp_path, architecture, config, **fields)
    model = transformers.Starcoder2ForCausalLM.from_pretrained(tmp_path)
    alone, fingerprint = expected(tmp_path, 3), model_identity(tmp_path, "float32").weights
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    adapted.save_pretrained(str(tmp_path))
    assert (tmp_path / "adapter_config.json").is_file()
    assert expected(tmp_path, 3) != alone, "transformers merges it"
    worker = TpModelWorker(options(tmp_path))
    assert_alike(generate(worker, 3), alone)
    worker.close()
    assert model_identity(tmp_path, "float32").weights == fingerprint
    assert "the adapter beside the weights is not applied" in caplog.text
