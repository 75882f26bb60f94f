"""Encoders equal transformers' own to 1e-5, however their inputs are batched."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from packages.scheduler.tests.executor.encoders.encoders import Make, close, some_inputs, vectors_of
from tercet.protocol.messages.values import Task, pack_ints
from tercet.scheduler.core.embedding.plan import EncodePlan, EncodeRow
from tercet.scheduler.executor.encoder_worker import EncoderOptions, EncoderWorker
from tercet.scheduler.model_files import ModelError, read_header

NO_ENDS = {"bos_token_id": None, "eos_token_id": None, "cls_token_id": None, "sep_token_id": None}
MODERN = {**NO_ENDS, "local_attention": 8, "norm_bias": True, "mlp_bias": True}
GLOBAL_ONLY = {**NO_ENDS, "layer_types": ["full_attention"] * 4, "hidden_activation": "gelu_pytorch_tanh"}
OF_MEANS = {"classifier_pooling": "mean", "classifier_bias": True}
SLIDES = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GROUPED = {"num_key_value_heads": 2, "head_dim": 10}

EMBEDDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", {}),
    "bert_masked": ("BertForMaskedLM", {"hidden_act": "relu", "layer_norm_eps": 1e-3}),
    "roberta": ("RobertaModel", {"type_vocab_size": 1}),
    "xlm_roberta": ("XLMRobertaModel", {"pad_token_id": 3}),
    "modernbert": ("ModernBertModel", MODERN),
    "modernbert_masked": ("ModernBertForMaskedLM", GLOBAL_ONLY),
    "qwen3": ("Qwen3Model", GROUPED),
    "qwen3_moe": ("Qwen3MoeModel", {**GROUPED, **EXPERTS}),
    "qwen3_lm": ("Qwen3ForCausalLM", {**GROUPED, "tie_word_embeddings": False}),
    "qwen3_sliding": ("Qwen3Model", {**SLIDES, "num_key_value_heads": 6}),
    "qwen3_bidirectional": ("Qwen3Model", {**GROUPED, "is_causal": False}),
    "mistral_bidirectional": ("MistralModel", {"sliding_window": 4, "num_key_value_heads": 3, "is_causal": False}),
    "mistral": ("MistralModel", {"sliding_window": 7, "num_key_value_heads": 3}),
    "phi3": ("Phi3Model", {"num_key_value_heads": 2}),
    "seed_oss": ("SeedOssModel", GROUPED),
    "smollm3": ("SmolLM3Model", {"num_key_value_heads": 2}),
    "granite": ("GraniteModel", {"embedding_multiplier": 2.0, "residual_multiplier": 0.3}),
    "glm": ("GlmModel", {**GROUPED, "head_dim": 8}),
    "ernie": ("Ernie4_5Model", GROUPED),
}
CLASSIFIERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForSequenceClassification", {"num_labels": 3}),
    "bert_reranker": ("BertForSequenceClassification", {"num_labels": 1}),
    "roberta": ("RobertaForSequenceClassification", {"num_labels": 2}),
    "xlm_roberta_reranker": ("XLMRobertaForSequenceClassification", {"num_labels": 1, "type_vocab_size": 1}),
    "modernbert": ("ModernBertForSequenceClassification", {**MODERN, "num_labels": 2}),
    "modernbert_mean": ("ModernBertForSequenceClassification", {**MODERN, **OF_MEANS, "num_labels": 4}),
    "qwen3": ("Qwen3ForSequenceClassification", {**GROUPED, "num_labels": 1}),
}


def sentence_files(directory: Path, pooling: str, *, normalize: bool = False, max_length: int | None = None) -> None:
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    if normalize:
        modules.append({"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"})
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    modes = {
        f"pooling_mode_{name}": name == pooling for name in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    }
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48, **modes}))
    if max_length is not None:
        (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_length}))


def expected(model: Any, row: EncodeRow) -> Any:
    """What transformers' model gives for one input."""
    ids = torch.frombuffer(bytearray(row.input_ids), dtype=torch.int32).long()[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if row.token_types:
        inputs["token_type_ids"] = torch.frombuffer(bytearray(row.token_types), dtype=torch.int32).long()[None]
    with torch.inference_mode():
        return model(**inputs)


@pytest.mark.parametrize("name", EMBEDDERS)
def test_vectors_equal_those_of_transformers(name: str, make: Make) -> None:
    architecture, extra = EMBEDDERS[name]
    directory, model = make(architecture, extra)
    sentence_files(directory, "mean_tokens")
    worker = EncoderWorker(EncoderOptions(model=directory, task=Task.EMBED, device="cpu"))
    rows = some_inputs(worker.capacity.token_types)
    base = getattr(model, model.base_model_prefix, model)
    for row, vector in zip(rows, vectors_of(worker, rows), strict=True):
        close(vector, expected(base, row).last_hidden_state[0].mean(0))


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_scores_equal_those_of_transformers(name: str, make: Make) -> None:
    architecture, extra = CLASSIFIERS[name]
    directory, model = make(architecture, extra)
    worker = EncoderWorker(EncoderOptions(model=directory, task=Task.CLASSIFY, device="cpu"))
    assert len(worker.labels) == worker.capacity.width == extra["num_labels"]
    rows = some_inputs(worker.capacity.token_types)
    for row, scores in zip(rows, vectors_of(worker, rows), strict=True):
        close(scores, expected(model, row).logits[0])


@pytest.mark.parametrize("pooling", ["cls_token", "mean_tokens", "max_tokens", "lasttoken"])
@pytest.mark.parametrize("normalize", [False, True])
def test_pooling_and_normalisation_are_those_of_sentence_transformers(
    pooling: str, normalize: bool, make: Make
) -> None:
    directory, model = make("BertModel", {})
    sentence_files(directory, pooling, normalize=normalize)
    worker = EncoderWorker(EncoderOptions(model=directory, task=Task.EMBED, device="cpu"))
    rows = some_inputs()
    for row, vector in zip(rows, vectors_of(worker, rows), strict=True):
        hidden = expected(model, row).last_hidden_state[0]
        wanted = {
            "cls_token": hidden[0],
            "mean_tokens": hidden.mean(0),
            "max_tokens": hidden.amax(0),
            "lasttoken": hidden[-1],
        }[pooling]
        close(vector, wanted / wanted.norm() if normalize else wanted)


def test_a_batch_gives_what_each_input_gives_by_itself(make: Make) -> None:
    directory, _ = make("ModernBertModel", MODERN)
    worker = EncoderWorker(EncoderOptions(model=directory, task=Task.EMBED, device="cpu"))
    rows = some_inputs()
    for row, vector in zip(rows, vectors_of(worker, rows), strict=True):
        close(vector, vectors_of(worker, [row])[0])


def test_a_causal_model_gives_its_last_token_normalised(make: Make) -> None:
    directory, model = make("Qwen3Model", GROUPED)
    worker = EncoderWorker(EncoderOptions(model=directory, task=Task.EMBED, device="cpu"))
    [row, *_] = some_inputs()
    hidden = expected(model, row).last_hidden_state[0, -1]
    close(vectors_of(worker, [row])[0], hidden / hidden.norm())


def test_a_bidirectional_decoder_gives_the_mean_of_its_tokens(make: Make) -> None:
    directory, model = make("Qwen3Model", {**GROUPED, "is_causal": False})
    worker = EncoderWorker(EncoderOptions(model=directory, task=Task.EMBED, device="cpu"))
    [row] = some_inputs()[:1]
    [vector] = vectors_of(worker, [row])
    close(vector, expected(model, row).last_hidden_state[0].mean(0))


def test_half_precision_is_near(make: Make) -> None:
    directory, model = make("BertModel", {"initializer_range": 0.1}, torch.bfloat16)
    worker = EncoderWorker(EncoderOptions(model=directory, task=Task.EMBED, device="cpu"))
    rows = some_inputs()
    for row, vector in zip(rows, vectors_of(worker, rows), strict=True):
        close(vector, expected(model, row).last_hidden_state[0].float().mean(0), tolerance=5e-2)


@pytest.mark.parametrize("name", ["bert", "qwen3"])
def test_float16_on_a_cpu_is_computed_exactly(name: str, make: Make) -> None:
    architecture, extra = EMBEDDERS[name]
    directory, model = make(architecture, extra, torch.float16)
    sentence_files(directory, "mean_tokens")
    worker = EncoderWorker(EncoderOptions(model=directory, task=Task.EMBED, device="cpu"))
    rows = some_inputs(worker.capacity.token_types)
    wide = type(model).from_pretrained(directory, dtype=torch.float32).eval()
    for row, vector in zip(rows, vectors_of(worker, rows), strict=True):
        close(vector, expected(wide, row).last_hidden_state[0].mean(0))


def test_limits_are_the_smallest_that_anybody_sets(make: Make) -> None:
    directory, _ = make("RobertaModel", {"pad_token_id": 3})
    plain = EncoderWorker(EncoderOptions(model=directory, task=Task.EMBED, device="cpu"))
    assert plain.capacity.context_length == 60  # position 0 to 3 are never used
    sentence_files(directory, "cls_token", max_length=40)
    worker = EncoderWorker(EncoderOptions(model=directory, task=Task.EMBED, device="cpu"))
    assert worker.capacity.context_length == 40
    longest = EncodeRow(pack_ints([7] * 60))
    assert len(vectors_of(plain, [longest])[0]) == 48
    loaded: list[int] = []
    options = EncoderOptions(model=directory, task=Task.EMBED, device="cpu", context_length=41)
    with pytest.raises(ValueError, match="beyond"):
        EncoderWorker(options, lambda done, _: loaded.append(done))
    assert not loaded


@pytest.mark.parametrize(
    ("told", "max_length", "alike"), [(None, None, False), (32, None, True), (33, None, False), (None, 32, True)]
)
def test_how_a_decoder_rotates_follows_the_longest_input(
    told: int | None, max_length: int | None, alike: bool, make: Make
) -> None:
    """Inputs no longer than the model was trained for are rotated so by transformers, whatever else is served."""
    rope = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 5.0, 9.0]}
    directory, model = make("Phi3Model", {"rope_parameters": rope, "original_max_position_embeddings": 32})
    sentence_files(directory, "lasttoken", max_length=max_length)
    worker = EncoderWorker(EncoderOptions(model=directory, task=Task.EMBED, device="cpu", context_length=told))
    row = some_inputs()[4]
    [vector], wanted = vectors_of(worker, [row]), expected(model, row).last_hidden_state[0, -1]
    assert ((vector - wanted).abs().max() < 1e-3) == alike


def test_numbers_that_are_not_finite_are_told_by_row(make: Make) -> None:
    directory, _ = make("BertModel", {})
    worker = EncoderWorker(EncoderOptions(model=directory, task=Task.EMBED, device="cpu"))
    worker._model.module.embeddings.word_embeddings.weight[9] = float("nan")  # type: ignore[operator, union-attr]
    rows = [EncodeRow(pack_ints(ids)) for ids in ([5, 6, 7], [8, 9], [10])]
    assert worker.submit(EncodePlan(step=0, rows=rows)).result().failed == [1]


@pytest.mark.parametrize("old", [True, False])
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(old: bool, make: Make) -> None:
    directory, _ = make("BertModel", {})
    path = directory / "model.safetensors"
    tensors = load_file(path)
    if old:  # names of the first checkpoints there were
        renamed = {
            "bert." + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
            for name, t in tensors.items()
        }
        save_file({**renamed, "cls.predictions.bias": torch.zeros(3)}, path)
        EncoderWorker(EncoderOptions(model=directory, task=Task.EMBED, device="cpu"))
    else:
        tensors["encoder.layer.1.attention.self.extra.weight"] = torch.zeros(2)
        del tensors["encoder.layer.0.output.dense.bias"]
        save_file(tensors, path)
        with pytest.raises(ModelError, match=r"missing: encoder.layer.0.output.dense.bias; unexpected: .*extra.weight"):
            EncoderWorker(EncoderOptions(model=directory, task=Task.EMBED, device="cpu"))


def test_progress_counts_every_byte_also_of_heads_that_are_left_out(make: Make) -> None:
    directory, _ = make(*EMBEDDERS["bert_masked"])
    told: list[tuple[int, int]] = []
    options = EncoderOptions(model=directory, task=Task.EMBED, device="cpu")
    EncoderWorker(options, lambda done, total: told.append((done, total)))
    header = read_header(directory / "model.safetensors")
    assert any(name.startswith("cls.") for name in header)
    assert len(told) == len(header)
    assert told[-1] == (told[0][1], sum(tensor.end - tensor.start for tensor in header.values()))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": "many"}, "hidden_size"),
        ({"num_attention_heads": 7}, "num_attention_heads"),
        ({"hidden_act": "swish9"}, "swish9"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        ({"architectures": ["NobodyModel"]}, "NobodyModel"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_by_name(change: dict[str, Any], named: str, make: Make) -> None:
    directory, _ = make("BertModel", {})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ModelError, match=named):
        EncoderWorker(EncoderOptions(model=directory, task=Task.EMBED, device="cpu"))
