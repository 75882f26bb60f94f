"""Embeddings in the place of arrays: their sizes, their values, and the refusal of the other kind."""

import hashlib
from typing import Any

import msgspec
import pytest
import torch

from packages.scheduler.tests.executor.media.test_images import Tower, inputs, planned, slot, store_of
from tercet.protocol.messages.audio import SoundFormat, SoundInput
from tercet.protocol.messages.embedding_form import EmbeddingForm
from tercet.protocol.messages.media import ImageFormat, ImageInput, PixelRange
from tercet.scheduler.core.plan import Row
from tercet.scheduler.executor.media.embeddings import EmbeddingStore
from tercet.scheduler.executor.media.images import StepImages
from tercet.scheduler.loaders import Loaders
from tercet.scheduler.testing import request

IMAGES = ImageFormat(
    size=PixelRange(min_pixels=1, max_pixels=64),
    patch=1,
    resample=2,
    marker="<image>",
    token="<image>",
    token_id=9,
    max_tokens=16,
)
SOUNDS = SoundFormat(rate=100, hop=2, samples=40, marker="<sound>", token="<sound>", token_id=9)
FORM = EmbeddingForm(width=2, dtype="float32", tower="t", images=IMAGES)


def made(number: int) -> torch.Tensor:
    """Return the three embeddings of an image."""
    return torch.arange(6.0).view(3, 2) + number


def frame(embeddings: torch.Tensor) -> bytes:
    return embeddings.contiguous().view(torch.uint8).numpy().tobytes()


def store(*numbers: int, **more: Any) -> EmbeddingStore:
    filled = EmbeddingStore(FORM, **more)
    assert filled.add(inputs(*numbers), [frame(made(each)) for each in numbers]) == ""
    return filled


def test_embeddings_of_another_size_are_refused() -> None:
    held = store(0, most_bytes=60)
    assert torch.equal(held.array(planned(0)), made(0))
    wrong = [[], [frame(made(1))[1:]], [frame(made(1)), frame(made(1))], [bytes(9)]]
    for frames in wrong:
        assert "do not fit" in held.add(inputs(1), frames)
    sound = SoundInput(sha256=bytes(32), samples=20, first=0, tokens=5)
    assert "do not fit" in held.add([sound], [bytes(FORM.frame_bytes(5))])
    assert "too many" in held.add(inputs(1, 2), [frame(made(1)), frame(made(2))])
    assert held.add(inputs(1), [memoryview(frame(made(1)))]) == ""


def test_sounds_have_the_size_of_their_tokens() -> None:
    held = EmbeddingStore(EmbeddingForm(width=2, dtype="bfloat16", tower="t", sounds=SOUNDS))
    sound = SoundInput(sha256=bytes(32), samples=20, first=0, tokens=SOUNDS.embeddings(20))
    values = torch.randn(SOUNDS.embeddings(20), 2).bfloat16()
    assert held.add([sound], [frame(values)]) == ""
    assert torch.equal(held.array(msgspec.structs.replace(planned(0), sha256=bytes(32))), values)
    assert "do not fit" in held.add(inputs(0), [frame(made(0))])


@pytest.mark.parametrize("whole", [True, False])
def test_a_step_reads_what_a_tower_would_have_made(whole: bool) -> None:
    tower, rows = Tower(), [Row(0, 0, 9, True), Row(1, 0, 4, False)]
    arrays = StepImages(tower, store_of(1, 2), 9, torch.device("cpu"), whole=whole)
    frames = EmbeddingStore(EmbeddingForm(width=1, dtype="float32", tower="t", images=IMAGES))
    encoded = [tower(store_of(each).array(planned(each))) for each in (1, 2)]
    assert frames.add(inputs(1, 2), [frame(each) for each in encoded]) == ""
    read = StepImages(lambda array: array, frames, 9, torch.device("cpu"), whole=whole)
    for images in (arrays, read):
        images.introduce(slot(0, (1, 0), (2, 4)))
        images.introduce(slot(1, (2, 1)))
    expected, found = arrays.embeddings(rows), read.embeddings(rows)
    assert expected is not None
    assert found is not None
    assert torch.equal(found.vectors, expected.vectors)
    assert torch.equal(found.places, expected.places)


@pytest.mark.parametrize("embedded", [True, False])
def test_the_other_kind_of_frames_is_refused_whatever_its_size(embedded: bool) -> None:
    array = bytes(9)
    image = ImageInput(sha256=hashlib.sha256(array).digest(), height=1, width=3, first=0, tokens=3)
    held = store_of(0) if embedded else EmbeddingStore(EmbeddingForm(width=1, dtype="float32", tower="t"))
    loaders = Loaders(images=held)
    asked = msgspec.structs.replace(request("r", [9, 9, 9], images=[image]), embedded=embedded)
    refusal = loaders.keep_media(asked, [array])
    assert refusal is not None
    assert (refusal.code, refusal.retry) == ("invalid_request", False)
    assert ("no embeddings" if embedded else "no arrays") in refusal.message
    assert loaders.keep_media(request("r", [1, 2]), []) is None, "text needs neither"
