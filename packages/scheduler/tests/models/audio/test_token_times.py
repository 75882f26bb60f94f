"""Times of tokens in audio, whole and in chunks, beside others and after a retraction, against transformers."""

import json
from pathlib import Path

import numpy as np
import pytest
from transformers.models.whisper.generation_whisper import _dynamic_time_warping

from packages.scheduler.tests.models.audio.checkpoint import write_whisper
from packages.scheduler.tests.models.audio.test_whisper import ANSWER, SHAPES, TEXT, TIMESTAMPS, Reference, Run, samples
from tercet.protocol.messages.audio import Transcript
from tercet.protocol.messages.values import LogprobParams
from tercet.scheduler.executor.media.token_times import first_positions
from tercet.scheduler.model_files import ModelError
from tercet.scheduler.models.audio.whisper import audio_model
from tercet.scheduler.testing import Driver

CLIPS = ("quiet", "half", "full")


@pytest.fixture(scope="module", params=SHAPES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whisper(tmp_path_factory.mktemp("whisper"), seconds=2, **SHAPES[request.param])


@pytest.fixture(scope="module")
def reference(directory: Path) -> Reference:
    return Reference(directory)


def times_in(driver: Driver, rid: str) -> list[float]:
    return driver.token_times[rid, 0]


def send(run: Run, rid: str, name: str, text: list[int]) -> None:
    run.send(rid, name, Transcript.TIMES, input_ids=text, max_new_tokens=1, logprobs=LogprobParams(prompt=True))


@pytest.mark.parametrize("budget", [512, 7])
def test_times_equal_those_of_transformers(directory: Path, reference: Reference, budget: int) -> None:
    run = Run(directory, config={"token_budget": budget})
    expected = {}
    for name in CLIPS:
        for kind in (TEXT, TIMESTAMPS):
            prompt = run.prompt(kind)
            ids, expected[f"{name} {kind}"] = reference.times(samples(name), kind, prompt, ANSWER)
            send(run, f"{name} {kind}", name, [*prompt, *ids[:-1]])
    run.send("beside", "half", TEXT)
    run.driver.run()
    for rid, times in expected.items():
        assert times_in(run.driver, rid) == pytest.approx(times, abs=1e-4)
        assert times == sorted(times)
    assert run.driver.output["beside", 0] == reference.of("half", TEXT, run.prompt(TEXT))
    assert max(times[-1] for times in expected.values()) > 1.0, "some tokens are late in the audio"


def test_audio_shorter_than_a_position_has_times(directory: Path) -> None:
    run = Run(directory)
    send(run, "r", "short", [*run.prompt(TEXT), 40, 41, 42])
    run.driver.run()
    assert times_in(run.driver, "r") == [0.0] * 3


def test_a_prompt_before_the_audio_has_no_times(directory: Path, reference: Reference) -> None:
    run = Run(directory)
    assert run.tokens.previous is not None
    prompt = [run.tokens.previous, 40, 41, 42, *run.prompt(TEXT)]
    ids, times = reference.times(samples("full"), TEXT, prompt, ANSWER)
    send(run, "r", "full", [*prompt, *ids[:-1]])
    run.driver.run()
    assert times_in(run.driver, "r") == pytest.approx(times, abs=1e-4)


def test_retracted_choices_and_cached_prompts_have_all_times(directory: Path, reference: Reference) -> None:
    run = Run(directory, config={"token_budget": 9})
    prompt = run.prompt(TIMESTAMPS)
    ids, times = reference.times(samples("full"), TIMESTAMPS, prompt, ANSWER)
    run.send("text", "full", TIMESTAMPS)
    run.driver.run()
    send(run, "r", "full", [*prompt, *ids[:-1]])
    for _ in range(2):
        run.driver.step()
    [req] = run.driver.core.planner.running
    assert 0 < req.computed < req.prompt_tokens
    run.driver.core.planner.retract(req)
    run.driver.run()
    assert times_in(run.driver, "r") == pytest.approx(times, abs=1e-4)
    assert run.driver.core.counters.retractions


def test_paths_are_the_cheapest() -> None:
    random = np.random.default_rng(3)
    for tokens, positions in ((1, 1), (1, 9), (9, 1), (7, 5), (30, 100)):
        for costs in (random.normal(size=(tokens, positions)), random.integers(0, 3, (tokens, positions))):
            text, times = _dynamic_time_warping(costs.astype(np.float32))
            firsts = [int(times[text == token].min()) for token in range(tokens)]
            assert first_positions(costs.astype(np.float32)).tolist() == firsts


@pytest.mark.parametrize(
    ("file", "fields", "fault"),
    [
        ("generation_config.json", {"alignment_heads": [[9, 0]]}, "alignment_heads: must be of 2 layers"),
        ("generation_config.json", {"alignment_heads": "all"}, "alignment_heads: must be a list"),
        ("config.json", {"median_filter_width": 6}, "median_filter_width: 6 is not odd"),
    ],
)
def test_other_alignments_are_refused(tmp_path: Path, file: str, fields: dict[str, object], fault: str) -> None:
    write_whisper(tmp_path, seconds=2)
    path = tmp_path / file
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(ModelError, match=fault):
        audio_model(tmp_path)


def test_a_model_without_alignment_has_no_times(tmp_path: Path) -> None:
    model = audio_model(write_whisper(tmp_path, seconds=2, aligned=False))
    assert (model.alignment, model.form.token_times) == (None, False)
    assert audio_model(write_whisper(tmp_path / "other", seconds=2)).form.token_times
