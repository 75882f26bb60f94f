"""Each field of an encoder's config.json at another value: what transformers computes, or a refusal by name."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers

from packages.scheduler.tests.executor.encoders.encoders import Make, close, some_inputs, vectors_of
from packages.scheduler.tests.executor.encoders.test_encoder_worker import (
    GROUPED,
    NO_ENDS,
    expected,
    sentence_files,
)
from tercet.protocol.messages.values import Task, pack_ints
from tercet.scheduler.architectures import embedders, is_decoder
from tercet.scheduler.core.embedding.plan import EncodeRow
from tercet.scheduler.executor.encoder_worker import EncoderOptions, EncoderWorker
from tercet.scheduler.file_fields import FileFields
from tercet.scheduler.model_files import ModelError
from tercet.scheduler.models.config.encoder_config import pad_of_decoder, parse_labels
from tercet.scheduler.models.families import bert, modernbert
from tercet.scheduler.models.registry import family_of

PAD = 5
PADDED = [
    EncodeRow(pack_ints(ids))
    for ids in ([7, 8, PAD, 9], [PAD, 7, 8, 9, 10], [7, 8, 9, PAD, PAD, PAD], [PAD, PAD, PAD], [PAD], [6, 7])
]
"""Inputs with the pad token before, among and after others, and alone."""

HONOURED: list[tuple[str, dict[str, Any]]] = [
    *(("BertModel", {"hidden_act": name}) for name in ("silu", "swish", "tanh", "gelu_new", "gelu_python", "relu")),
    ("BertModel", {"layer_norm_eps": 0.5, "type_vocab_size": 5, "num_attention_heads": 4}),
    ("BertModel", {"chunk_size_feed_forward": 1, "hidden_dropout_prob": 0.5, "use_cache": False}),
    ("XLMRobertaModel", {"layer_norm_eps": 0.1, "pad_token_id": 4}),
    ("ModernBertModel", {"local_attention": 7}),
    ("ModernBertModel", {"local_attention": 2, "norm_eps": 0.3, "attention_bias": True}),
    ("ModernBertModel", {"layer_types": ["sliding_attention", "full_attention"] * 2, "local_attention": 6}),
    (
        "ModernBertModel",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 50.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 7.0},
            },
            "hidden_activation": "silu",
        },
    ),
]


@pytest.mark.parametrize(("architecture", "extra"), HONOURED)
def test_values_that_are_honoured_give_what_transformers_gives(
    architecture: str, extra: dict[str, Any], make: Make
) -> None:
    directory, model = make(architecture, {**(NO_ENDS if "Modern" in architecture else {}), **extra})
    sentence_files(directory, "mean_tokens")
    worker = EncoderWorker(EncoderOptions(model=directory, task=Task.EMBED, device="cpu"))
    rows = some_inputs(worker.capacity.token_types)
    for row, vector in zip(rows, vectors_of(worker, rows), strict=True):
        close(vector, expected(model, row).last_hidden_state[0].mean(0))


@pytest.mark.parametrize("changed", [{"global_rope_theta": 50.0}, {"global_attn_every_n_layers": 2}])
def test_older_names_of_modernbert_give_what_transformers_gives(changed: dict[str, Any], make: Make) -> None:
    directory, model = make("ModernBertModel", {**NO_ENDS, "local_attention": 6})
    edit(directory, {"rope_parameters": None, "layer_types": None, "local_rope_theta": 7.0, **changed})
    sentence_files(directory, "mean_tokens")
    model = type(model).from_pretrained(directory).eval()
    worker = EncoderWorker(EncoderOptions(model=directory, task=Task.EMBED, device="cpu"))
    rows = some_inputs()
    for row, vector in zip(rows, vectors_of(worker, rows), strict=True):
        close(vector, expected(model, row).last_hidden_state[0].mean(0))


@pytest.mark.parametrize("architecture", ["BertModel", "RobertaModel", "ModernBertModel"])
def test_the_pad_token_in_an_input_is_as_in_transformers(architecture: str, make: Make) -> None:
    directory, model = make(architecture, {**NO_ENDS, "pad_token_id": PAD})
    sentence_files(directory, "mean_tokens")
    worker = EncoderWorker(EncoderOptions(model=directory, task=Task.EMBED, device="cpu"))
    for rows in (sorted(PADDED, key=lambda row: len(row.input_ids)), PADDED[:1]):
        for row, vector in zip(rows, vectors_of(worker, rows), strict=True):
            close(vector, expected(model, row).last_hidden_state[0].mean(0))


@pytest.mark.parametrize("pad", [PAD, None, -1])
@pytest.mark.parametrize("labels", [1, 3])
def test_a_decoder_scores_the_last_token_that_is_not_the_pad_token(pad: int | None, labels: int, make: Make) -> None:
    directory, model = make("Qwen3ForSequenceClassification", {**GROUPED, "num_labels": labels, "pad_token_id": None})
    edit(directory, {"pad_token_id": pad})
    model.config.pad_token_id = pad
    worker = EncoderWorker(EncoderOptions(model=directory, task=Task.CLASSIFY, device="cpu"))
    for row, scores in zip(PADDED, vectors_of(worker, PADDED), strict=True):
        close(scores, expected(model, row).logits[0])


@pytest.mark.parametrize("family", [name for name in embedders() if is_decoder(name)])
def test_the_pad_token_that_is_left_out_is_that_of_transformers(family: str) -> None:
    default = family_of(f"{family}ForCausalLM").pad_token_id
    assert default == getattr(transformers, f"{family}Config")().pad_token_id
    assert pad_of_decoder({}, default) == default
    assert pad_of_decoder({"pad_token_id": None}, default) is None
    with pytest.raises(ModelError, match="pad_token_id: '3' is no token id"):
        pad_of_decoder({"pad_token_id": "3"}, default)


REFUSED: list[tuple[str, FileFields]] = [("BertModel", bert.FIELDS), ("ModernBertModel", modernbert.FIELDS)]
VALUES: Mapping[str, Any] = {
    "quantization_config": {"quant_method": "fp8"},
    "pruned_heads": {"0": [1]},
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "head_dim": 16,
    "sliding_window": 4,
    "auto_map": {"AutoModel": "x.Y"},
}


@pytest.mark.parametrize(
    ("architecture", "name"), [(architecture, name) for architecture, fields in REFUSED for name in fields.refused]
)
def test_what_is_not_computed_is_refused_by_name(architecture: str, name: str, make: Make) -> None:
    directory, _ = make(architecture, NO_ENDS)
    edit(directory, {name: VALUES.get(name, True)})
    with pytest.raises(ModelError, match=rf"^config\.json: {name}: .*"):
        EncoderWorker(EncoderOptions(model=directory, task=Task.EMBED, device="cpu"))


@pytest.mark.parametrize(
    ("architecture", "change", "message"),
    [
        ("BertModel", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("BertModel", {"hidden_act": "gelu_fast"}, "activation 'gelu_fast' is not supported"),
        ("ModernBertModel", {"local_attention": 1}, "local_attention"),
        ("ModernBertModel", {"classifier_pooling": "max"}, "classifier_pooling"),
        ("ModernBertModel", {"layer_types": ["full_attention"]}, "layer_types"),
        ("ModernBertModel", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_type"),
    ],
)
def test_values_that_are_not_supported_are_refused_by_name(
    architecture: str, change: dict[str, Any], message: str, make: Make
) -> None:
    directory, _ = make(architecture, NO_ENDS)
    edit(directory, change)
    with pytest.raises(ModelError, match=rf"^config\.json: .*{message}"):
        EncoderWorker(EncoderOptions(model=directory, task=Task.EMBED, device="cpu"))


@pytest.mark.parametrize(
    ("config", "labels"),
    [
        ({}, ["LABEL_0", "LABEL_1"]),
        ({"num_labels": 3}, ["LABEL_0", "LABEL_1", "LABEL_2"]),
        ({"id2label": {"1": "b", "0": "a"}, "num_labels": 2}, ["a", "b"]),
    ],
)
def test_labels_are_those_of_transformers(config: dict[str, Any], labels: list[str]) -> None:
    assert parse_labels(config) == labels
    named = transformers.BertConfig(**config).id2label
    assert named is not None
    assert [named[number] for number in range(len(labels))] == labels


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"id2label": {"0": "a"}, "num_labels": 2}, "num_labels: 2 is not the 1 of id2label"),
        ({"id2label": {"1": "a", "2": "b"}}, "id2label: must name the labels 0 to 1"),
    ],
)
def test_labels_that_contradict_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_labels(config)


def edit(directory: Path, change: Mapping[str, Any]) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
