"""Models with images, from files to answers: whole, in chunks, beside text and from the prefix cache."""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("PIL")

from tercet.frontend.media.prompt_media import replacement_of
from tercet.scheduler.model_files import ModelError
from tercet.scheduler.models.vision.wrappers import image_model
from tests.integration.image_families import FAMILIES, SIZES, Family, Parts, Reference, Run
from tests.integration.media_scripts import check_answers, check_interrupted, check_prefix_hits, words

of_each_tower = pytest.mark.parametrize(
    "family",
    ["Mistral 3", "LLaVA", "LLaVA-OneVision", "Llama 4", "InternVL", "SmolVLM", "Gemma 4", "Gemma 4, whole images"],
    indirect=True,
    scope="module",
)
"""Tests that need no second family with the same code."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def directory(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family.write(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def reference(family: Family, directory: Path) -> Reference:
    return Reference(family, directory)


@pytest.fixture
def run(directory: Path) -> Iterator[Run]:
    made = Run(directory)
    yield made
    made.worker.close()


ONE: Parts = [words(5, 1), "odd", words(9, 2)]
TWO: Parts = [words(21, 3), "portrait", "landscape", words(3, 4)]
FIVE: Parts = ["one pixel", words(2, 5), "odd", "portrait", words(30, 6), "square", "landscape", words(4, 7)]
ALL = {"one": ONE, "two": TWO, "five": FIVE, "text": [words(33, 8)]}


def test_answers_equal_those_of_transformers(directory: Path, reference: Reference) -> None:
    check_answers(Run(directory), reference, ALL)


@of_each_tower
def test_chunks_that_cut_images_change_no_answer(directory: Path, reference: Reference) -> None:
    check_answers(Run(directory, budget=7), reference, ALL)


def test_texts_of_images_equal_those_of_transformers(run: Run, family: Family) -> None:
    for name, count in product(SIZES, (1, 2)):
        shown = run.decoded(name, count)
        assert replacement_of(shown, run.form) == family.text(shown)
        for place in run.prompt([name] * count).images:
            assert place.place.tokens <= run.form.max_tokens


@of_each_tower
def test_prefix_hits_before_inside_and_after_an_image_change_no_answer(run: Run, reference: Reference) -> None:
    check_prefix_hits(run, reference, "odd", "square", depend=run.form.several is not None)


@of_each_tower
def test_retracted_forked_and_resumed_choices_get_the_same_answers(directory: Path, reference: Reference) -> None:
    check_interrupted(Run(directory, budget=48), reference, {"one": ONE, "two": TWO}, FIVE)


@of_each_tower
def test_names_of_tensors_may_be_those_of_transformers_4(family: Family, tmp_path: Path, reference: Reference) -> None:
    family.write(tmp_path, old_names=True)
    run = Run(tmp_path)
    assert run.answers({"one": ONE})["one"] == reference.answer(run, ONE)
    run.worker.close()


def test_processors_that_are_not_supported_are_refused(family: Family, directory: Path, tmp_path: Path) -> None:
    for path in directory.iterdir():
        if path.suffix == ".json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    for change, why in family.refused:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({**family.preprocessor, **change}))
        with pytest.raises(ModelError, match=why):
            image_model(tmp_path)


def test_configs_that_are_not_supported_are_refused(family: Family, directory: Path, tmp_path: Path) -> None:
    for path in directory.iterdir():
        if path.suffix == ".json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((directory / "config.json").read_text())
    for change, why in family.refused_configs:
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ModelError, match=why):
            image_model(tmp_path)
