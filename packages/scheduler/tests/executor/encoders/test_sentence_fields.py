"""Each field of sentence-transformers' files at another value: what it computes, or a refusal by name."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from packages.scheduler.tests.conftest import write_tokenizer
from packages.scheduler.tests.executor.encoders.encoders import Make, close, some_inputs, vectors_of
from packages.scheduler.tests.executor.encoders.test_encoder_worker import sentence_files
from tercet.protocol.messages.values import Task
from tercet.scheduler.executor.encoder_worker import EncoderOptions, EncoderWorker
from tercet.scheduler.model_files import ModelError, model_identity
from tercet.scheduler.model_task import read_sentences
from tercet.scheduler.sentence_fields import NORMALIZE, SETTINGS, SETTINGS_FIELDS, TRANSFORMER

BERT_CONFIG, POOLING_CONFIG = "sentence_bert_config.json", "1_Pooling/config.json"
PREFIX = "sentence_transformers.models."


def written(directory: Path, name: str, content: object) -> None:
    (directory / name).parent.mkdir(exist_ok=True)
    (directory / name).write_text(json.dumps(content))


def modules(*kinds: str, prefix: str = PREFIX, **more: Any) -> list[dict[str, Any]]:
    return [
        {"type": prefix + kind, "path": "" if kind == "Transformer" else f"{place}_{kind}", **more}
        for place, kind in enumerate(kinds)
    ]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    written(tmp_path, "config.json", {})
    written(tmp_path, POOLING_CONFIG, {"pooling_mode": "mean", "embedding_dimension": 48})
    written(tmp_path, "modules.json", modules("Transformer", "Pooling", "Normalize"))
    return tmp_path


def theirs(directory: Path, rows: Any) -> list[torch.Tensor]:
    """What sentence-transformers makes of tokens; it wants a tokenizer, which nothing here reads."""
    reference = pytest.importorskip("sentence_transformers")
    made = reference.SentenceTransformer(str(directory), device="cpu", local_files_only=True)
    found = []
    for row in rows:
        ids = torch.frombuffer(bytearray(row.input_ids), dtype=torch.int32).long()[None]
        with torch.inference_mode():
            out = made({"input_ids": ids, "attention_mask": torch.ones_like(ids)})["sentence_embedding"][0]
        found.append(out[: made.truncate_dim])
    return found


HONOURED: dict[str, dict[str, Any]] = {
    "legacy modes": {POOLING_CONFIG: {"word_embedding_dimension": 48, "pooling_mode_cls_token": True}},
    "no mode is the mean": {POOLING_CONFIG: {"word_embedding_dimension": 48, "pooling_mode_cls_token": False}},
    "one mode in a list": {POOLING_CONFIG: {"embedding_dimension": 48, "pooling_mode": ["max"]}},
    "the newer field first": {
        POOLING_CONFIG: {"embedding_dimension": 48, "pooling_mode": "lasttoken", "pooling_mode_cls_token": True}
    },
    "shortened": {SETTINGS: {"truncate_dim": 7, "similarity_fn_name": "dot", "model_type": "SentenceTransformer"}},
    "shortened to more": {SETTINGS: {"truncate_dim": 700}},
    "of the transformer": {
        BERT_CONFIG: {
            "max_seq_length": 30,
            "transformer_task": "feature-extraction",
            "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
            "module_output_name": "token_embeddings",
            "model_args": {"attn_implementation": "eager"},
        }
    },
    "normalised by name": {"2_Normalize/config.json": {"module_input_name": "sentence_embedding"}},
}


@pytest.mark.parametrize("name", HONOURED)
def test_values_that_are_honoured_give_what_sentence_transformers_gives(name: str, make: Make) -> None:
    directory, _ = make("BertModel", {})
    write_tokenizer(directory)
    sentence_files(directory, "mean_tokens", normalize=True)
    for path, content in HONOURED[name].items():
        written(directory, path, content)
    worker = EncoderWorker(EncoderOptions(model=directory, task=Task.EMBED, device="cpu"))
    rows = some_inputs()
    for vector, wanted in zip(vectors_of(worker, rows), theirs(directory, rows), strict=True):
        close(vector, wanted)
        assert len(vector) == min(HONOURED[name].get(SETTINGS, {}).get("truncate_dim", 48), 48)


REFUSED: list[tuple[str, object, str]] = [
    *((BERT_CONFIG, {name: 3}, rf"{BERT_CONFIG}: {name}: 3 is not supported") for name in TRANSFORMER.refused),
    *(("2_Normalize/config.json", {name: "token_embeddings"}, f"{name}: 'token_em") for name in NORMALIZE.refused),
    *((SETTINGS, {name: "SparseEncoder"}, f"{name}: 'SparseEncoder'") for name in SETTINGS_FIELDS.refused),
    ("modules.json", modules("Transformer", "Pooling", kwargs=["task"]), "kwargs: .*task"),
    ("modules.json", modules("Transformer", "Pooling", prefix="custom_st."), r"type: 'custom_st\.Transformer'"),
    ("modules.json", modules("Transformer", "Pooling", "Dense"), "Dense"),
    ("modules.json", modules("Transformer", "Pooling", "LayerNorm"), "LayerNorm"),
    ("modules.json", modules("Transformer", "Normalize"), "the modules are Transformer, Normalize, not"),
    ("modules.json", modules("Transformer", "Pooling", "Normalize", "Pooling"), "the modules are"),
    ("modules.json", modules("Pooling"), "the modules are Pooling"),
    ("modules.json", modules("MLMTransformer", "SpladePooling"), "MLMTransformer"),
    *((POOLING_CONFIG, {"pooling_mode": mode}, mode) for mode in ("weightedmean", "mean_sqrt_len_tokens", "median")),
    (POOLING_CONFIG, {"pooling_mode": ["cls", "mean"]}, "pooling by cls and mean"),
    (POOLING_CONFIG, {"pooling_mode": "mean", "include_prompt": False}, "include_prompt"),
    (POOLING_CONFIG, {"pooling_mode": "mean", "layers": 4}, "layers: 4 is not supported"),
    (BERT_CONFIG, {"transformer_task": "fill-mask"}, "transformer_task: 'fill-mask'"),
    (BERT_CONFIG, {"module_output_name": "scores"}, "module_output_name: 'scores'"),
    (BERT_CONFIG, {"modality_config": {"text": {"method": "forward", "method_output_name": "pooler_output"}}}, "texts"),
    (
        BERT_CONFIG,
        {
            "modality_config": {
                "text": {"method": "forward", "method_output_name": "last_hidden_state"},
                "message": {"method": "forward", "method_output_name": "last_hidden_state", "format": "flat"},
            }
        },
        "chat template",
    ),
    (BERT_CONFIG, {"config_args": {"hidden_act": "relu"}}, "config_args: {'hidden_act'"),
    (BERT_CONFIG, {"model_kwargs": {"revision": "x"}}, "model_kwargs"),
    (BERT_CONFIG, {"tokenizer_args": {"add_eos_token": True}}, "tokenizer_args"),
    (BERT_CONFIG, {"max_seq_length": "long"}, "max_seq_length: 'long'"),
    (BERT_CONFIG, {"later": 1}, "later: 1 is not supported: the field is unknown"),
    ("sentence_xlm-roberta_config.json", {"do_lower_case": True}, "do_lower_case: True"),
    (SETTINGS, {"default_prompt_name": "passage", "prompts": {"title": "t: "}}, "default_prompt_name: 'passage'"),
    (SETTINGS, {"truncate_dim": "8"}, "truncate_dim: '8'"),
    (SETTINGS, {"similarity_fn_name": "maxsim"}, "similarity_fn_name: 'maxsim'"),
    (SETTINGS, {"activation_fn": "torch.nn.modules.activation.Tanh"}, "activation_fn: .*Tanh"),
]


@pytest.mark.parametrize(("path", "content", "message"), REFUSED)
def test_what_is_not_computed_is_refused_by_name(path: str, content: object, message: str, model: Path) -> None:
    assert read_sentences(model, causal=False).normalize
    written(model, path, content)
    with pytest.raises(ModelError, match=message) as caught:
        read_sentences(model, causal=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["bert", "roberta", "xlm-roberta"])
def test_the_length_is_read_under_every_name_of_its_file(name: str, model: Path) -> None:
    written(model, BERT_CONFIG, {})
    written(model, f"sentence_{name}_config.json", {"max_seq_length": 77, "do_lower_case": name == "bert"})
    assert read_sentences(model, causal=False).max_length == 77


def test_a_cross_encoder_has_its_transformer_alone(model: Path) -> None:
    written(model, "modules.json", modules("Transformer", prefix="sentence_transformers.base.modules.transformer."))
    config = {
        "transformer_task": "sequence-classification",
        "module_output_name": "scores",
        "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
    }
    written(model, BERT_CONFIG, config)
    written(model, SETTINGS, {"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.linear.Identity"})
    assert read_sentences(model, causal=False, task=Task.CLASSIFY).dimensions is None
    with pytest.raises(ModelError, match="names no Pooling"):
        read_sentences(model, causal=False)
    written(model, SETTINGS, {"prompts": {"q": "query: "}, "default_prompt_name": "q"})
    with pytest.raises(ModelError, match="default_prompt_name: 'q' is not supported: pairs of texts have no prompt"):
        read_sentences(model, causal=False, task=Task.CLASSIFY)
    written(model, "modules.json", modules("Transformer", "LogitScore"))
    with pytest.raises(ModelError, match="LogitScore"):
        read_sentences(model, causal=False, task=Task.CLASSIFY)


@pytest.mark.parametrize(
    "config",
    [
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}},
        {"sbert_ce_default_activation_function": "torch.nn.modules.activation.ReLU"},
    ],
)
@pytest.mark.parametrize("alone", [True, False])
def test_an_activation_that_frontends_do_not_have_is_refused(
    config: Mapping[str, Any], alone: bool, tmp_path: Path
) -> None:
    written(tmp_path, "config.json", config)
    if not alone:
        written(tmp_path, "modules.json", modules("Transformer"))
    with pytest.raises(ModelError, match=r"config\.json: .*activation.*(Tanh|ReLU)' is not supported"):
        read_sentences(tmp_path, causal=False, task=Task.CLASSIFY)


def test_what_decides_a_vector_is_in_the_fingerprint(make: Make) -> None:
    directory, _ = make("BertModel", {})
    seen = set()
    for path, content in (
        ("modules.json", modules("Transformer", "Pooling", "Normalize")),
        ("1_Pooling/config.json", {"pooling_mode": "cls"}),
        ("3_Pooling/config.json", {"pooling_mode": "max"}),
        (SETTINGS, {"truncate_dim": 8}),
        (SETTINGS, {"truncate_dim": 9}),
    ):
        written(directory, path, content)
        seen.add(model_identity(directory, "float32").weights)
    assert len(seen) == 5
