"""Models with clips, from files to answers: whole, in chunks, beside text and images, and from the prefix cache."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("av")

from packages.scheduler.tests.models.vision.qwen_checkpoint import FAMILIES, write_qwen
from tercet.protocol.messages.values import Resume, pack_ints
from tests.integration.video_families import Parts, Reference, Run, words

of_each_way = pytest.mark.parametrize("family", ["Qwen2_5_VL", "Qwen3VL", "Qwen3_5"], indirect=True, scope="module")
"""Tests that need no second family with the same code."""


@pytest.fixture(scope="module", params=[*FAMILIES, "Qwen3_5"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def directory(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen(tmp_path_factory.mktemp("watching"), family)


@pytest.fixture(scope="module")
def reference(family: str, directory: Path) -> Reference:
    return Reference(family, directory)


@pytest.fixture
def run(directory: Path) -> Iterator[Run]:
    made = Run(directory)
    yield made
    made.worker.close()


CLIP: Parts = [words(5, 1), "clip", words(9, 2)]
BOTH: Parts = [words(7, 3), "square", words(3, 4), "clip", words(2, 5), "tall", "wide", words(4, 6)]
ALL = {"clip": CLIP, "both": BOTH, "text": [words(33, 8)]}


def test_answers_equal_those_of_transformers(run: Run, reference: Reference) -> None:
    assert run.answers(ALL) == {name: reference.answer(run, parts) for name, parts in ALL.items()}


LONG: Parts = [words(5, 20), "long", words(9, 21)]


@pytest.mark.parametrize("family", ["Qwen3VL", "Qwen3_5"], indirect=True, scope="module")
def test_long_clips_with_stamps_have_the_same_answers(run: Run, reference: Reference) -> None:
    assert run.answers({"long": LONG})["long"] == reference.answer(run, LONG)


@pytest.mark.parametrize(("family", "step"), [("Qwen2VL", 1), ("Qwen2_5_VL", 4)], indirect=["family"], scope="module")
def test_text_after_a_long_clip_goes_on_from_its_time(run: Run, reference: Reference, step: int) -> None:
    assert run.answers({"long": LONG})["long"] == reference.continued_at(run, LONG, step)


@of_each_way
def test_a_hundred_tokens_equal_those_of_transformers(run: Run, reference: Reference) -> None:
    assert run.answers({"clip": CLIP}, max_new_tokens=100)["clip"] == reference.answer(run, CLIP, 100)


@of_each_way
def test_chunks_that_cut_clips_change_no_answer(directory: Path, reference: Reference) -> None:
    run = Run(directory, budget=7)
    answers = run.answers(ALL)
    expected = {name: reference.answer(run, parts) for name, parts in ALL.items()}
    run.worker.close()
    assert answers == expected


@of_each_way
def test_prefix_hits_before_inside_and_after_a_clip_change_no_answer(run: Run, reference: Reference) -> None:
    encoded: list[int] = []
    run.worker._runner._media._images._tower.register_forward_hook(lambda *_: encoded.append(1))  # type: ignore[union-attr]
    before, after = words(14, 10), words(6, 11)
    chats: list[Parts] = [
        [before, "clip", after],
        [before, "clip", after],
        [before, "clip", words(5, 12)],
        [before, "tall", after],
        [before, "still", after],
        [before, "still", after],
    ]
    hits = []
    for number, parts in enumerate(chats):
        counted = run.driver.core.counters.cached_tokens
        assert run.answers({f"r{number}": parts})[f"r{number}"] == reference.answer(run, parts)
        hits.append(run.driver.core.counters.cached_tokens - counted)
    whole = len(run.prompt(chats[0]).ids)
    assert hits[0] == 0
    if not run.driver.core.memory.states:  # a recurrent model goes on from few places of a prompt
        assert whole - 4 <= hits[1] < whole
        assert whole - 10 <= hits[2] < whole
        assert len(before) - 4 <= hits[3] < whole - 10
        shown = [run.prompt([name]).placed for name in ("clip", "tall", "still")]
        groups = {(each.place.sha256, getattr(each.place, "time", 0)) for placed in shown for each in placed}
        assert len(encoded) == len(groups), "each group is encoded once at each time"


@of_each_way
def test_retracted_forked_and_resumed_choices_get_the_same_answers(directory: Path, reference: Reference) -> None:
    run = Run(directory, budget=48)
    asked: dict[str, Parts] = {"clip": CLIP, "both": BOTH}
    for rid, parts in asked.items():
        run.send(rid, parts, n=2)
    again: Parts = ["tall", words(4, 7)]
    begun = run.driver.output["resumed", 0] = reference.answer(run, again)[:5]
    run.send("resumed", again, attempt=1, resume=[Resume(0, pack_ints(begun))])
    for _ in range(9):
        run.driver.step()
    planner = run.driver.core.planner
    for req in [req for req in planner.running if not req.in_flight]:
        planner.retract(req)
    run.driver.core.memory.flush()
    run.driver.run()
    expected = {(rid, index): reference.answer(run, parts) for rid, parts in asked.items() for index in (0, 1)}
    assert run.driver.output == expected | {("resumed", 0): reference.answer(run, again)}
    assert run.driver.core.counters.retractions
    run.worker.close()
