"""Models with images, from files to answers: whole, in chunks, beside text and from the prefix cache."""

import json
import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("PIL")

from tercet.frontend.media.prompt_media import replacement_of
from tercet.protocol.messages.values import Resume, pack_ints
from tercet.scheduler.model_files import ModelError
from tercet.scheduler.models.vision.wrappers import image_model
from tests.integration.image_families import FAMILIES, FIRST_MARK, SIZES, Family, Parts, Reference, Run

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


def words(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, FIRST_MARK), k=count)


ONE: Parts = [words(5, 1), "odd", words(9, 2)]
TWO: Parts = [words(21, 3), "portrait", "landscape", words(3, 4)]
FIVE: Parts = ["one pixel", words(2, 5), "odd", "portrait", words(30, 6), "square", "landscape", words(4, 7)]
ALL = {"one": ONE, "two": TWO, "five": FIVE, "text": [words(33, 8)]}


def test_answers_equal_those_of_transformers(run: Run, reference: Reference) -> None:
    answers = run.answers(ALL)
    assert answers == {name: reference.answer(run, parts) for name, parts in ALL.items()}
    assert min(len({*answer}) for answer in answers.values()) > 3, "an answer of one token would prove little"


@of_each_tower
def test_chunks_that_cut_images_change_no_answer(directory: Path, reference: Reference) -> None:
    run = Run(directory, budget=7)
    answers = run.answers(ALL)
    expected = {name: reference.answer(run, parts) for name, parts in ALL.items()}
    run.worker.close()
    assert answers == expected


def test_texts_of_images_equal_those_of_transformers(run: Run, family: Family) -> None:
    for name, count in product(SIZES, (1, 2)):
        shown = run.decoded(name, count)
        assert replacement_of(shown, run.form) == family.text(shown)
        for place in run.prompt([name] * count).images:
            assert place.place.tokens <= run.form.max_tokens


@of_each_tower
def test_prefix_hits_before_inside_and_after_an_image_change_no_answer(run: Run, reference: Reference) -> None:
    encoded: list[int] = []
    run.worker._runner._media._images._tower.register_forward_hook(lambda *_: encoded.append(1))  # type: ignore[union-attr]
    before, after = words(14, 10), words(6, 11)
    chats: list[Parts] = [
        [before, "odd", after],
        [before, "odd", after],
        [before, "odd", words(5, 12)],
        [before, "square", after],
        [before, "square", after, "odd", words(3, 13)],
    ]
    hits = []
    for number, parts in enumerate(chats):
        counted = run.driver.core.counters.cached_tokens
        assert run.answers({f"r{number}": parts})[f"r{number}"] == reference.answer(run, parts)
        hits.append(run.driver.core.counters.cached_tokens - counted)
    first, cut = len(run.prompt(chats[0]).ids), len(run.prompt([before]).ids)
    assert hits[0] == 0
    assert first - 4 <= hits[1] < first
    assert first - 10 <= hits[2] < first
    assert cut - 4 <= hits[3] < first - 10
    if run.form.several is None:
        assert hits[4] >= len(run.prompt(chats[3]).ids) - 4
        assert len(encoded) == 2, "each image is encoded once"
    else:
        assert cut - 4 <= hits[4] < first - 10, "a second image changes the first one"
        assert len(encoded) == 4
    encoded.clear()
    counted = run.driver.core.counters.cached_tokens
    assert run.answers({"other": chats[0]}, salt="another tenant")["other"] == reference.answer(run, chats[0])
    assert run.driver.core.counters.cached_tokens == counted
    assert len(encoded) == 1, "another tenant's image saves no time"
    assert reference.answer(run, chats[0]) != reference.answer(run, chats[3]), "another image has another answer"


@of_each_tower
def test_retracted_forked_and_resumed_choices_get_the_same_answers(directory: Path, reference: Reference) -> None:
    run = Run(directory, budget=48)
    asked: dict[str, Parts] = {"one": ONE, "two": TWO}
    for rid, parts in asked.items():
        run.send(rid, parts, n=2)
    begun = run.driver.output["resumed", 0] = reference.answer(run, FIVE)[:5]
    run.send("resumed", FIVE, attempt=1, resume=[Resume(0, pack_ints(begun))])
    for _ in range(9):
        run.driver.step()
    planner = run.driver.core.planner
    for req in [req for req in planner.running if not req.in_flight]:
        planner.retract(req)
    run.driver.core.memory.flush()
    run.driver.run()
    expected = {(rid, index): reference.answer(run, parts) for rid, parts in asked.items() for index in (0, 1)}
    assert run.driver.output == expected | {("resumed", 0): reference.answer(run, FIVE)}
    assert run.driver.core.counters.retractions
    run.worker.close()


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
