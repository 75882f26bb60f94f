"""Embeddings of a tower alone, in a language model alone: the answers of the whole model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("PIL")
pytest.importorskip("soundfile")
pytest.importorskip("soxr")
pytest.importorskip("av")

from packages.scheduler.tests.models.vision.qwen_checkpoint import write_qwen
from tercet.frontend.manager.inputs.images import PlacedImage
from tercet.scheduler.core.embedding.media_inputs import EncodeMediaPlan
from tercet.scheduler.executor.media.tower_worker import TowerWorker
from tercet.scheduler.executor.worker_options import WorkerOptions
from tests.integration import image_families, sound_families, video_families
from tests.integration.image_families import Parts, Prompt, Run
from tests.integration.sound_families import HearingRun

ANSWERS: Mapping[str, Parts] = {
    "text": [[5, 6, 7, 8, 9]],
    "one": ["square", [5, 6]],
    "two": [[7], "landscape", [8, 9], "portrait", [3]],
    "twice": ["square", [5], "square", [6]],
}
WATCHED: Mapping[str, Parts] = {
    "text": [[5, 6, 7]],
    "one": ["clip", [5, 6]],
    "two": [[7], "square", [8], "tall", [3]],
}
HEARD: Mapping[str, Parts] = {"text": [[5, 6, 7]], "one": ["odd", [5, 6]], "two": [[7], "short", [8], "tone", [3]]}


class Encoder:
    """An encoder of a model."""

    def __init__(self, directory: Path, options: Mapping[str, Any]) -> None:
        self._worker = TowerWorker(WorkerOptions(model=directory, device="cpu", dtype=options.get("dtype", "auto")))
        self.form = self._worker.form

    def embedded(self, placed: Sequence[PlacedImage]) -> list[PlacedImage]:
        """Return images or sounds with embeddings in the place of arrays."""
        return [msgspec.structs.replace(each, array=self._embeddings(each)) for each in placed]

    def _embeddings(self, placed: PlacedImage) -> bytes:
        plan = EncodeMediaPlan(step=0, media=placed.place, array=memoryview(placed.array))
        result = self._worker.submit(plan).result()
        assert result.failure == ""
        return result.embeddings


class SplitRun(Run):
    """Core over a worker without a tower, which gets the embeddings of an encoder."""

    def __init__(self, directory: Path, **options: Any) -> None:
        super().__init__(directory, language_only=True, **options)
        self.encoder = Encoder(directory, options)

    def prompt(self, parts: Parts) -> Prompt:
        plain = super().prompt(parts)
        return Prompt(plain.ids, self.encoder.embedded(plain.images))


class SplitHearingRun(SplitRun, HearingRun):
    """The same for sounds."""


class SplitVideoRun(video_families.Run):
    """The same for clips."""

    def __init__(self, directory: Path, **options: Any) -> None:
        super().__init__(directory, language_only=True, **options)
        self.encoder = Encoder(directory, options)

    def prompt(self, parts: Parts) -> video_families.Prompt:
        plain = super().prompt(parts)
        return plain._replace(placed=self.encoder.embedded(plain.placed))


def assert_equal(
    whole: Run | video_families.Run, split: SplitRun | SplitVideoRun, requests: Mapping[str, Parts]
) -> None:
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


@pytest.mark.parametrize("kind", ["Qwen2_5_VL", "Qwen3VL"])
def test_answers_about_clips_are_those_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    directory = write_qwen(tmp_path, kind)
    options: dict[str, Any] = {"dtype": "float32", "budget": 48}
    assert_equal(video_families.Run(directory, **options), SplitVideoRun(directory, **options), WATCHED)
