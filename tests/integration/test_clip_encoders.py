"""Groups of frames that a tower alone encodes, in a language model alone: the answers of the whole model."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("av")

from packages.scheduler.tests.models.vision.qwen_checkpoint import write_qwen
from tercet.protocol.messages.encodings import EncodeMediaReq
from tercet.protocol.messages.media import ImageInput
from tercet.scheduler.core.embedding.media_inputs import EncodeMediaPlan, MediaInputs
from tercet.scheduler.core.events import MediaReceived
from tercet.scheduler.executor.media.tower_worker import TowerWorker
from tercet.scheduler.executor.worker_options import WorkerOptions
from tests.integration.video_families import Parts, Prompt, Run, words

CONTEXT = 400
"""Tokens of the language model, by which its clips are bounded. The encoder has those of config.json, 512."""
ALL: dict[str, Parts] = {
    "clip": [words(5, 1), "clip", words(9, 2)],
    "both": [words(7, 3), "square", words(3, 4), "clip", words(2, 5), "tall", words(4, 6)],
    "text": [words(33, 8)],
}


class SplitRun(Run):
    """Core over a worker without a tower, which gets the embeddings of an encoder."""

    def __init__(self, directory: Path, **options: Any) -> None:
        super().__init__(directory, language_only=True, **options)
        self.encoder = TowerWorker(WorkerOptions(model=directory, device="cpu"))

    def prompt(self, parts: Parts) -> Prompt:
        plain, inputs = super().prompt(parts), MediaInputs(self.encoder.form)
        placed = []
        for each in plain.placed:
            assert isinstance(each.place, ImageInput)
            array = memoryview(each.array)
            asked = EncodeMediaReq(rid="r", attempt=0, image=each.place)
            assert inputs.fault(MediaReceived(asked, (array,))) is None
            made = self.encoder.submit(EncodeMediaPlan(step=0, media=each.place, array=array)).result()
            placed.append(msgspec.structs.replace(each, array=made.embeddings))
        return plain._replace(placed=placed)


@pytest.mark.parametrize("family", ["Qwen2_5_VL", "Qwen3VL"])
def test_answers_about_clips_are_those_of_the_whole_model(family: str, tmp_path: Path) -> None:
    directory = write_qwen(tmp_path, family)
    whole, split = (made(directory, budget=64, context_length=CONTEXT) for made in (Run, SplitRun))
    assert isinstance(split, SplitRun)
    assert split.worker.images is not None
    form = split.worker.images.embeddings
    assert form is not None
    assert (form == split.encoder.form) is (family == "Qwen3VL"), "clips of the other have bounds by the context"
    assert split.encoder.form.encodes_for(form)
    for turn in ("first", "again"):
        requests = {f"{turn} {name}": parts for name, parts in ALL.items()}
        assert split.answers(requests) == whole.answers(requests)


def test_a_group_for_another_encoder_is_refused(tmp_path: Path) -> None:
    encoder = TowerWorker(WorkerOptions(model=write_qwen(tmp_path), device="cpu"))
    group = Run(tmp_path).prompt([words(5, 1), "clip"]).placed[0]
    assert isinstance(group.place, ImageInput)
    blind = msgspec.structs.replace(encoder.form, video=None)
    assert not blind.encodes_for(encoder.form)
    for form, place in [(blind, group.place), (encoder.form, msgspec.structs.replace(group.place, frames=5))]:
        received = MediaReceived(EncodeMediaReq(rid="r", attempt=0, image=place), (memoryview(group.array),))
        fault = MediaInputs(form).fault(received)
        assert fault is not None
        assert fault[0] == "invalid_request"
