"""Models that hear, from WAV files to answers: whole, in chunks, beside text and from the prefix cache."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("soundfile")

from tercet.protocol.messages.values import LogprobParams
from tercet.scheduler.architectures import text_architecture
from tercet.scheduler.model_files import ModelError, read_json
from tercet.scheduler.models.registry import family_of
from tests.integration.image_families import Parts
from tests.integration.media_scripts import check_answers, check_interrupted, check_prefix_hits, words
from tests.integration.sound_families import FAMILIES, LONG, Hearing, HearingReference, HearingRun


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Hearing:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def directory(family: Hearing, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family.write(tmp_path_factory.mktemp("hearing"))


@pytest.fixture(scope="module")
def reference(family: Hearing, directory: Path) -> HearingReference:
    return HearingReference(family, directory)


@pytest.fixture
def run(directory: Path) -> Iterator[HearingRun]:
    made = HearingRun(directory)
    yield made
    made.worker.close()


ONE: Parts = [words(5, 1), "odd", words(9, 2)]
TWO: Parts = [words(21, 3), "short", words(2, 9), "longest", words(3, 4)]
FOUR: Parts = ["shortest", words(2, 5), "odd", words(30, 6), "tone", words(1, 8), "short", words(4, 7)]
ALL = {"one": ONE, "two": TWO, "four": FOUR, "text": [words(33, 8)]}


def test_answers_equal_those_of_transformers(directory: Path, reference: HearingReference) -> None:
    check_answers(HearingRun(directory), reference, ALL)


def test_chunks_that_cut_sounds_change_no_answer(directory: Path, reference: HearingReference) -> None:
    check_answers(HearingRun(directory, budget=7), reference, ALL)


def test_a_hundred_tokens_equal_those_of_transformers(run: HearingRun, reference: HearingReference) -> None:
    assert run.answers({"one": ONE}, max_new_tokens=100)["one"] == reference.answer(run, ONE, 100)


def test_log_probabilities_equal_those_of_transformers(run: HearingRun, reference: HearingReference) -> None:
    run.send("r", FOUR, logprobs=LogprobParams(prompt=True))
    run.driver.run()
    assert run.driver.prompt_logprobs["r", 0][1:] == pytest.approx(reference.logprobs(run, FOUR), abs=1e-3)


def test_sounds_of_several_windows_equal_those_of_transformers(
    family: Hearing, directory: Path, reference: HearingReference
) -> None:
    if not family.sounds.keys() & LONG.keys():
        pytest.skip("its sounds have one window")
    asked: dict[str, Parts] = {name: [words(5, 1), name, words(3, 2), "odd"] for name in LONG}
    check_answers(HearingRun(directory, budget=64), reference, asked)


def test_the_form_of_a_transcription_is_known(run: HearingRun, family: Hearing) -> None:
    hears_speech = "[TRANSCRIBE]" in family.marks
    assert run.sounds.transcription == (
        "[INST][BEGIN_AUDIO][AUDIO][/INST]{language}[TRANSCRIBE]" if hears_speech else ""
    )


def test_each_sound_has_the_tokens_of_transformers(run: HearingRun, family: Hearing) -> None:
    for name, samples in family.sounds.items():
        [place] = run.prompt([name]).images
        assert place.place.tokens == family.tokens(samples)


def test_prefix_hits_before_inside_and_after_a_sound_change_no_answer(
    run: HearingRun, reference: HearingReference
) -> None:
    check_prefix_hits(run, reference, "odd", "tone")


def test_retracted_forked_and_resumed_choices_get_the_same_answers(
    directory: Path, reference: HearingReference
) -> None:
    check_interrupted(HearingRun(directory, budget=48), reference, {"one": ONE, "two": TWO}, FOUR)


def test_models_that_are_not_supported_are_refused(family: Hearing, directory: Path, tmp_path: Path) -> None:
    of_features: list[tuple[dict[str, Any], str]] = [
        ({"chunk_length": 30}, "chunk_length 30 of the features is not 100 positions"),
        ({"do_normalize": True}, "do_normalize True is not supported"),
    ]
    cases = {"preprocessor_config.json": of_features, "config.json": family.refused}
    for file, change, why in [(file, *each) for file, own in cases.items() for each in own]:
        for path in directory.glob("*.json"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
        (tmp_path / file).write_text(json.dumps({**json.loads((directory / file).read_text()), **change}))
        with pytest.raises(ModelError, match=why):
            family_of(text_architecture(read_json(tmp_path / "config.json"))).sounds(tmp_path)
