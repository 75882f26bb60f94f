"""BART and mBART, alone and beside others, against transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from packages.scheduler.tests.models.encoder_decoder.checkpoint import BEGIN, END, write_bart
from packages.scheduler.tests.models.encoder_decoder.runs import ANSWER, Reference, Run, text
from tercet.protocol.messages.values import LogprobParams, Resume, pack_ints
from tercet.scheduler.device import time_slices
from tercet.scheduler.executor.media import texts
from tercet.scheduler.model_files import ModelError
from tercet.scheduler.models.layers.encoder_decoder import text_encoder

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "bart": {},
    "mbart": {"kind": "MBart", "scale_embedding": True, "activation_function": "relu", "forced": 77},
}
LENGTHS = 1, 2, 37, 150, 192


@pytest.fixture(scope="module", params=SHAPES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bart(tmp_path_factory.mktemp("bart"), **SHAPES[request.param])


@pytest.fixture(scope="module")
def reference(directory: Path) -> Reference:
    return Reference(directory)


@pytest.mark.parametrize("backend", ["cpu", "torch_native"])
@pytest.mark.parametrize("overlap", [0, 1])
def test_answers_equal_those_of_transformers(directory: Path, reference: Reference, backend: str, overlap: int) -> None:
    run = Run(directory, overlap=overlap, attention_backend=backend)
    read = [text(length) for length in LENGTHS]
    expected = [reference.answer(each, run.start) for each in read]
    assert run.answers(read) == expected
    assert len({tuple(each) for each in expected}) == len(LENGTHS), "the answers depend on the texts"
    assert min(len({*each}) for each in expected) > 4, "and on what was answered before"
    assert [run.answers([each])[0] for each in read[:3]] == expected[:3], "and one by one"


def test_an_encoder_computes_in_parts(directory: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_slices, "_PART", 1.0)  # parts of 16 rows
    pauses: list[None] = []
    monkeypatch.setattr(text_encoder, "pause", lambda: pauses.append(None))
    run = Run(directory)
    assert run.answers([text(150)]) == [reference.answer(text(150), run.start)]
    assert len(pauses) > 2 * 3 * 10, "ten parts of each product and attention of a layer"


def test_logits_equal_those_of_transformers(directory: Path, reference: Reference) -> None:
    run = Run(directory)
    run.send("r", text(150), logprobs=LogprobParams(top=0))
    run.driver.run()
    said, expected = run.driver.output["r", 0], reference.logprobs(text(150), run.start)
    assert len(said) == ANSWER
    for place, token in enumerate(said):
        assert run.driver.logprobs["r", 0][place] == pytest.approx(float(expected[place][token]), abs=1e-4)


def test_the_start_is_that_of_generate(directory: Path, reference: Reference) -> None:
    forced = json.loads((directory / "generation_config.json").read_text())["forced_bos_token_id"]
    run = Run(directory)
    assert run.start == [END, forced]
    whole = reference.generate(text(37), 9)
    assert whole[:2] == run.start
    assert run.answers([text(37)], max_new_tokens=8, ignore_eos=False) == [whole[2:]]


def test_choices_of_one_request_share_an_encoding(directory: Path, reference: Reference) -> None:
    run = Run(directory)
    run.send("r", text(150), n=3)
    run.driver.run()
    expected = reference.answer(text(150), run.start)
    assert [run.driver.output["r", choice] for choice in range(3)] == [expected] * 3
    assert sum(len(plan.texts) for plan in run.driver.plans) == 1


def test_prefixes_are_cached_for_each_text(directory: Path, reference: Reference) -> None:
    run = Run(directory)
    run.start = [*run.start, *text(40)]
    expected = [reference.answer(text(length), run.start) for length in (37, 150)]
    assert run.answers([text(37)]) == run.answers([text(37)]) == expected[:1]
    assert run.driver.core.counters.cached_tokens == 40
    assert run.answers([text(150)]) == expected[1:], "another text has other keys"
    assert run.driver.core.counters.cached_tokens == 40


def test_longer_starts_are_computed_in_chunks(directory: Path, reference: Reference) -> None:
    run = Run(directory, config={"token_budget": 7})
    run.start = [*run.start, *text(30)]
    read = [text(37), text(150)]
    assert run.answers(read) == [reference.answer(each, run.start) for each in read]
    assert run.driver.core.counters.chunks > 6


def test_retracted_choices_go_on(directory: Path, reference: Reference) -> None:
    page = 2 * 2 * 4 * 48 * 4
    run = Run(directory, kv_cache_bytes=50 * page, config={"reserve": 0.0, "reserve_floor": 0.0})
    read = [text(37), text(150), text(2)]
    assert run.answers(read) == [reference.answer(each, run.start) for each in read]
    assert run.driver.core.counters.retractions


def test_resumed_choices_go_on(directory: Path, reference: Reference) -> None:
    run = Run(directory)
    expected = reference.answer(text(150), run.start)
    run.driver.output["r", 0] = expected[:50]
    run.send("r", text(150), attempt=1, resume=[Resume(0, pack_ints(expected[:50]))])
    run.driver.run()
    assert run.driver.output["r", 0] == expected


def test_texts_take_turns_where_few_pages_fit(
    directory: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = 2 * 2 * 4 * 48 * 4
    monkeypatch.setattr(texts, "available_bytes", lambda _: 4 * 50 * page)
    run = Run(directory)
    assert run.worker.capacity.texts is not None
    assert run.worker.capacity.texts.pages == 50
    read = [text(length) for length in LENGTHS]
    assert run.answers(read) == [reference.answer(each, run.start) for each in read]
    monkeypatch.setattr(texts, "available_bytes", lambda _: 4 * 10 * page)
    run = Run(directory)
    assert run.worker.capacity.texts is not None
    assert run.worker.capacity.texts.form.tokens == 40, "only shorter texts are served"
    monkeypatch.setattr(texts, "available_bytes", lambda _: page)
    with pytest.raises(ValueError, match="does not hold a page"):
        Run(directory)


def test_weights_of_other_kinds_answer(directory: Path) -> None:
    ways: list[dict[str, Any]] = [{"quantization": "int8"}, {"dtype": "bfloat16"}, {"load_format": "dummy"}]
    for options in ways:
        assert len(Run(directory, **options).answers([text(37)])[0]) == ANSWER


def test_adapters_are_refused(directory: Path) -> None:
    with pytest.raises(ValueError, match="models with cross-attention run no adapters"):
        Run(directory, max_loras=1)


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("file", "fields", "fault"),
    [
        ("config.json", {"tie_word_embeddings": False}, "tie_word_embeddings"),
        ("config.json", {"encoder_attention_heads": 7}, "encoder_attention_heads"),
        ("config.json", {"activation_function": "mish"}, "activation_function"),
        ("generation_config.json", {"decoder_start_token_id": "a"}, "decoder_start_token_id"),
    ],
)
def test_unsupported_files_are_refused(tmp_path: Path, file: str, fields: Mapping[str, Any], fault: str) -> None:
    write_bart(tmp_path)
    change(tmp_path / file, **fields)
    with pytest.raises(ModelError, match=fault):
        Run(tmp_path)


def test_settings_that_are_not_applied_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_bart(tmp_path, forced=None)
    change(tmp_path / "generation_config.json", num_beams=4, no_repeat_ngram_size=3, min_length=0)
    assert Run(tmp_path).start == [END]
    [line] = [record.message for record in caplog.records if "not applied" in record.message]
    assert line.endswith("not applied: no_repeat_ngram_size=3 num_beams=4")


def test_embeddings_have_any_of_their_names(tmp_path: Path) -> None:
    write_bart(tmp_path)
    known = Run(tmp_path).answers([text(37)])
    tensors = load_file(tmp_path / "model.safetensors")
    shared = tensors.pop("model.shared.weight")
    named = {"encoder.embed_tokens.weight": shared.clone(), "lm_head.weight": shared}
    del tensors["final_logits_bias"]
    others = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(others | named, tmp_path / "model.safetensors", {"format": "pt"})
    change(tmp_path / "generation_config.json", forced_bos_token_id=BEGIN)
    run = Run(tmp_path)
    assert len(run.answers([text(37)])[0]) == len(known[0])
    del others["encoder.layers.2.fc1.bias"]
    save_file(others | named, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"missing: encoder\.layers\.2\.fc1\.bias"):
        Run(tmp_path)
