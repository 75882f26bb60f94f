"""Whisper, alone and beside others, against transformers."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packages.scheduler.tests.models.audio.checkpoint import write_whisper
from packages.scheduler.tests.models.audio.reference import WhisperReference
from tercet.protocol.messages.audio import AudioInput, Transcript
from tercet.protocol.messages.messages import TokenizedGenerateReqInput
from tercet.protocol.messages.values import LogprobParams, Resume, pack_ints
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.executor.media import audio
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.model_files import ModelError
from tercet.scheduler.models.audio.whisper import audio_model
from tercet.scheduler.testing import Driver, request

ANSWER = 24
TEXT, TIMESTAMPS, LANGUAGE = Transcript.TEXT, Transcript.TIMESTAMPS, Transcript.LANGUAGE
SECONDS = {"quiet": 0.0, "short": 0.01, "half": 1.0, "full": 2.0}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "tiny": {},
    "turbo": {"num_mel_bins": 128, "encoder_layers": 3, "decoder_layers": 1, "scale_embedding": True},
}


@pytest.fixture(scope="module", params=SHAPES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whisper(tmp_path_factory.mktemp("whisper"), seconds=2, **SHAPES[request.param])


@cache
def samples(name: str) -> bytes:
    """Return audio of a length, silence for none."""
    random = np.random.default_rng(len(name))
    count = round(16_000 * SECONDS[name])
    loudness = 3000 * np.abs(np.sin(np.arange(count) / 4000))
    return (random.standard_normal(count) * loudness).astype("<i2").tobytes() or bytes(9000)


class Run:
    """A core over a real worker, which gets samples as the loop gives them."""

    def __init__(self, directory: Path, *, overlap: int = 0, config: Mapping[str, Any] = {}, **options: Any) -> None:
        made: dict[str, Any] = {"device": "cpu", "slots": 4, "page_size": 4, "kv_cache_bytes": 1 << 22}
        self.worker = TpModelWorker(WorkerOptions(model=directory, **(made | options)))
        core = CoreConfig(**{"token_budget": 512, **config})
        self.driver = Driver(self.worker.capacity, core, executor=self.worker, overlap=overlap)
        assert self.worker.capacity.audio is not None
        self.tokens = self.worker.capacity.audio.form.tokens

    def prompt(self, kind: Transcript, language: str = "de", task: str = "transcribe") -> list[int]:
        tokens = self.tokens
        if kind is LANGUAGE:
            return [tokens.start]
        named = [tokens.languages[language], getattr(tokens, task)] if tokens.languages else []
        return [tokens.start, *named, *([tokens.no_timestamps] if kind is TEXT else [])]

    def send(self, rid: str, name: str, kind: Transcript = TEXT, **more: Any) -> TokenizedGenerateReqInput:
        data = samples(name)
        audio = AudioInput(sha256=hashlib.sha256(data).digest(), transcript=kind)
        given = {"max_new_tokens": 1 if kind is LANGUAGE else ANSWER, "temperature": 0.0}
        ids = more.pop("input_ids", None) or self.prompt(kind)
        asked = request(rid, ids, audio=audio, **(given | more))
        assert self.worker.audio is not None
        assert self.worker.audio.add(audio, [data]) == ""
        self.driver.send(asked)
        return asked

    def answers(self, wanted: Sequence[tuple[str, Transcript]]) -> list[list[int]]:
        """Return the answers to requests that run side by side."""
        rids = [f"r{len(self.driver.output) + number}" for number in range(len(wanted))]
        for rid, (name, kind) in zip(rids, wanted, strict=True):
            self.send(rid, name, kind)
        self.driver.run()
        self.driver.assert_empty()
        return [self.driver.output[rid, 0] for rid in rids]


class Reference(WhisperReference):
    """Answers to the audio clips of these tests."""

    def of(self, name: str, kind: Transcript, prompt: Sequence[int]) -> list[int]:
        return self.answer(samples(name), kind, prompt, ANSWER)


@pytest.fixture(scope="module")
def reference(directory: Path) -> Reference:
    return Reference(directory)


ALL = [(name, kind) for name in SECONDS for kind in (TEXT, TIMESTAMPS, LANGUAGE)]


@pytest.mark.parametrize("backend", ["cpu", "torch_native"])
@pytest.mark.parametrize("overlap", [0, 1])
def test_answers_equal_those_of_transformers(directory: Path, reference: Reference, backend: str, overlap: int) -> None:
    run = Run(directory, overlap=overlap, attention_backend=backend)
    expected = [reference.of(name, kind, run.prompt(kind)) for name, kind in ALL]
    assert run.answers(ALL) == expected
    assert len({tuple(each) for each in expected}) > len(SECONDS) + 2, "audio clips and kinds differ"
    assert [run.answers([each])[0] for each in ALL[:4]] == expected[:4], "and one by one"


@pytest.mark.parametrize("kind", [TEXT, TIMESTAMPS])
def test_logits_equal_those_of_transformers(directory: Path, reference: Reference, kind: Transcript) -> None:
    run = Run(directory)
    run.send("r", "half", kind, logprobs=LogprobParams(top=0))
    run.driver.run()
    expected = reference.generate(samples("half"), kind, run.prompt(kind), ANSWER)
    said = run.driver.output["r", 0]
    for place, (token, scores) in enumerate(zip(said, expected.scores, strict=True)):
        assert run.driver.logprobs["r", 0][place] == pytest.approx(float(scores[0].log_softmax(0)[token]), abs=1e-4)


def test_choices_of_one_request_are_equal(directory: Path, reference: Reference) -> None:
    run = Run(directory)
    run.send("r", "full", TIMESTAMPS, n=2)
    run.driver.run()
    expected = reference.of("full", TIMESTAMPS, run.prompt(TIMESTAMPS))
    assert run.driver.output["r", 0] == run.driver.output["r", 1] == expected
    assert sum(len(plan.audio) for plan in run.driver.plans) == 1


def test_retracted_choices_go_on(directory: Path, reference: Reference) -> None:
    layers = json.loads((directory / "config.json").read_text())["decoder_layers"]
    page = layers * 2 * 4 * 32 * 4
    run = Run(directory, kv_cache_bytes=11 * page, config={"reserve": 0.0, "reserve_floor": 0.0})
    wanted = [("half", TEXT), ("full", TIMESTAMPS), ("quiet", TIMESTAMPS)]
    assert run.answers(wanted) == [reference.of(name, kind, run.prompt(kind)) for name, kind in wanted]
    assert run.driver.core.counters.retractions


def test_resumed_choices_go_on(directory: Path, reference: Reference) -> None:
    run = Run(directory)
    expected = reference.of("full", TIMESTAMPS, run.prompt(TIMESTAMPS))
    run.driver.output["r", 0] = expected[:5]
    run.send("r", "full", TIMESTAMPS, attempt=1, resume=[Resume(0, pack_ints(expected[:5]))])
    run.driver.run()
    assert run.driver.output["r", 0] == expected


def test_audio_clips_take_turns_at_few_places(
    directory: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audio, "available_bytes", lambda _: 4 * 60_000)
    run = Run(directory)
    assert run.worker.capacity.audio is not None
    assert run.worker.capacity.audio.places in (1, 2)
    wanted = [(name, TEXT) for name in SECONDS]
    assert run.answers(wanted) == [reference.of(name, kind, run.prompt(kind)) for name, kind in wanted]


def test_no_place_is_no_model(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audio, "available_bytes", lambda _: 1000)
    with pytest.raises(ValueError, match="does not hold an encoded clip"):
        Run(directory)


@pytest.mark.parametrize(("options", "fault"), [({"load_format": "dummy"}, "dummy"), ({"max_loras": 1}, "adapters")])
def test_options_that_do_not_fit_are_refused(directory: Path, options: Mapping[str, Any], fault: str) -> None:
    with pytest.raises((ValueError, ModelError), match=fault):
        Run(directory, **options)


def test_a_model_of_one_language_names_none(tmp_path: Path) -> None:
    run = Run(write_whisper(tmp_path, seconds=2, several=False))
    assert (run.tokens.languages, run.tokens.transcribe, run.tokens.translate) == ({}, None, None)
    wanted = [("half", TEXT), ("half", TIMESTAMPS)]
    assert run.answers(wanted) == [Reference(tmp_path).of(name, kind, run.prompt(kind)) for name, kind in wanted]


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("file", "fields", "fault"),
    [
        ("preprocessor_config.json", {"chunk_length": 30}, "chunk_length 30"),
        ("preprocessor_config.json", {"dither": 0.1}, "dither"),
        ("generation_config.json", {"eos_token_id": None}, "eos_token_id"),
        ("generation_config.json", {"suppress_tokens": ["a"]}, "suppress_tokens"),
        ("tokenizer.json", {"added_tokens": []}, "startoftranscript"),
    ],
)
def test_unsupported_files_are_refused(tmp_path: Path, file: str, fields: Mapping[str, Any], fault: str) -> None:
    write_whisper(tmp_path, seconds=2)
    change(tmp_path / "config.json", eos_token_id=None)
    change(tmp_path / file, **fields)
    with pytest.raises(ModelError, match=fault):
        audio_model(tmp_path)


def test_files_of_transformers_5_are_read(tmp_path: Path) -> None:
    write_whisper(tmp_path, seconds=2)
    known = audio_model(tmp_path).form
    features = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "processor_config.json").write_text(json.dumps({"feature_extractor": features}))
    assert audio_model(tmp_path).form == known


def test_an_encoder_that_lacks_tensors_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_whisper(tmp_path, seconds=2)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.encoder.conv1.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"missing: conv1\.weight"):
        Run(tmp_path)
