"""Embeddings of a tower alone, in a language model alone: the answers of the whole model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("PIL")
pytest.importorskip("soundfile")
pytest.importorskip("soxr")

from tercet.scheduler.core.embedding.media_inputs import EncodeMediaPlan
from tercet.scheduler.executor.media.tower_worker import TowerWorker
from tercet.scheduler.executor.worker_options import WorkerOptions
from tests.integration import image_families, sound_families
from tests.integration.image_families import Parts, Prompt, Run
from tests.integration.sound_families import HearingRun

ANSWERS: Mapping[str, Parts] = {
    "text": [[5, 6, 7, 8, 9]],
    "one": ["square", [5, 6]],
    "two": [[7], "landscape", [8, 9], "portrait", [3]],
    "twice": ["square", [5], "square", [6]],
}
HEARD: Mapping[str, Parts] = {"text": [[5, 6, 7]], "one": ["odd", [5, 6]], "two": [[7], "short", [8], "tone", [3]]}


class SplitRun(Run):
    """Core over a worker without a tower, which gets the embeddings of an encoder."""

    def __init__(self, directory: Path, **options: Any) -> None:
        super().__init__(directory, language_only=True, **options)
        self.encoder = TowerWorker(WorkerOptions(model=directory, device="cpu", dtype=options.get("dtype", "auto")))

    def prompt(self, parts: Parts) -> Prompt:
        plain = super().prompt(parts)
        return Prompt(plain.ids, [msgspec.structs.replace(each, array=self._embedded(each)) for each in plain.images])

    def _embedded(self, placed: Any) -> bytes:
        plan = EncodeMediaPlan(step=0, media=placed.place, array=memoryview(placed.array))
        result = self.encoder.submit(plan).result()
        assert result.failure == ""
        return result.embeddings


class SplitHearingRun(SplitRun, HearingRun):
    """The same for sounds."""


def assert_equal(whole: Run, split: SplitRun, requests: Mapping[str, Parts]) -> None:
    """Compare answers, also of cached prefixes, and with two choices."""
    assert split.worker.images is not None
    assert split.worker.images.embeddings == split.encoder.form
    for name, more in {"first": {}, "again": {}, "two": {"n": 2, "seed": 5, "temperature": 0.7}}.items():
        named = {f"{name} {rid}": parts for rid, parts in requests.items()}
        assert split.answers(named, **more) == whole.answers(named, **more), name


@pytest.mark.parametrize("name", image_families.FAMILIES)
def test_answers_about_images_are_those_of_the_whole_model(name: str, tmp_path: Path) -> None:
    directory = image_families.FAMILIES[name].write(tmp_path)
    options: dict[str, Any] = {"dtype": "float32", "budget": 48}
    assert_equal(Run(directory, **options), SplitRun(directory, **options), ANSWERS)


@pytest.mark.parametrize("name", sound_families.FAMILIES)
def test_answers_about_sounds_are_those_of_the_whole_model(name: str, tmp_path: Path) -> None:
    directory = sound_families.FAMILIES[name].write(tmp_path)
    options: dict[str, Any] = {"dtype": "float32", "budget": 48}
    assert_equal(HearingRun(directory, **options), SplitHearingRun(directory, **options), HEARD)
