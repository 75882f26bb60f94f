"""Arrays and embeddings of images are kept within bounds, as long as they are needed."""

import hashlib
import resource
from pathlib import Path

import msgspec
import pytest
import torch

from tercet.protocol.messages.media import ImageFormat, ImageInput
from tercet.protocol.messages.values import SamplingParams
from tercet.scheduler.core.plan import PlannedImage, Row, SlotInit
from tercet.scheduler.executor.images import ImageStore, StepImages

FORM = ImageFormat(height=1, width=2, resample=2, marker="", replacement="", token_id=9, tokens=3)
ARRAYS = [bytes([number]) * FORM.array_bytes for number in range(4)]
HASHES = [hashlib.sha256(array).digest() for array in ARRAYS]


def inputs(*numbers: int) -> list[ImageInput]:
    return [ImageInput(sha256=HASHES[each], first=0, tokens=3) for each in numbers]


def store_of(*numbers: int) -> ImageStore:
    store = ImageStore(FORM)
    assert store.add(inputs(*numbers), [ARRAYS[each] for each in numbers]) == ""
    return store


def test_arrays_that_do_not_fit_are_refused() -> None:
    store = ImageStore(FORM, most_bytes=2 * FORM.array_bytes)
    assert "do not fit" in store.add(inputs(0), [])
    assert "do not fit" in store.add(inputs(0), [ARRAYS[0], ARRAYS[1]])
    assert "do not fit" in store.add(inputs(0), [ARRAYS[0][1:]])
    assert store.add(inputs(0, 1), [memoryview(ARRAYS[0]), ARRAYS[1]]) == ""
    assert store.add(inputs(1), [ARRAYS[1]]) == "", "it is there already"
    assert "too many" in store.add(inputs(2), [ARRAYS[2]])
    store.retain({HASHES[0]})
    assert store.add(inputs(2), [ARRAYS[2]]) == ""
    with pytest.raises(KeyError):
        store.array(HASHES[1])


class Tower:
    """A tower whose embeddings are the first value of an array."""

    def __init__(self) -> None:
        self.encoded: list[int] = []

    def __call__(self, arrays: torch.Tensor) -> torch.Tensor:
        values = arrays[:, 0, 0, 0].float()
        self.encoded += values.int().tolist()
        return values.view(-1, 1, 1) + torch.arange(3).view(1, 3, 1) / 10


def slot(number: int, *images: tuple[int, int]) -> SlotInit:
    """Return a choice with images (number, first token)."""
    planned = [PlannedImage(number=-1 - each, sha256=HASHES[each], first=first, tokens=3) for each, first in images]
    sampling = SamplingParams(max_new_tokens=1)
    return SlotInit(slot=number, tokens=b"", prompt_tokens=9, choice=0, sampling=sampling, images=planned)


@pytest.mark.parametrize("whole", [True, False])
def test_embeddings_are_in_the_places_of_their_tokens(whole: bool) -> None:
    tower = Tower()
    images = StepImages(tower, store_of(1, 2), torch.device("cpu"), whole=whole)
    images.introduce([slot(0, (1, 2), (2, 6)), slot(1), slot(2, (2, 0))])
    rows = [Row(1, 8, 1, True), Row(0, 3, 6, False), Row(2, 0, 4, False)]
    found = images.begin(rows)
    assert found is not None
    assert found.places.tolist() == [1, 2, 4, 5, 6, 7, 8, 9]
    assert found.vectors.flatten().tolist() == pytest.approx([1.1, 1.2, 2.0, 2.1, 2.2, 2.0, 2.1, 2.2])
    assert sorted(tower.encoded) == [1, 2], "an image of two choices is encoded once"
    seen = [9, 5, 5, 6, 9, 9, 9, 3, 3, 3, 4] if whole else None
    assert (None if found.seen is None else found.seen.tolist()) == seen
    assert images.begin([Row(1, 9, 1, True), Row(0, 9, 1, True)]) is None
    images.introduce([slot(0)])
    assert images.begin([Row(0, 0, 9, False)]) is None


def test_embeddings_used_last_are_kept_within_the_bound() -> None:
    tower = Tower()
    images = StepImages(tower, store_of(0, 1, 2), torch.device("cpu"), whole=True, most_bytes=2 * 12)
    images.introduce([slot(number, (number, 0)) for number in range(3)])
    for number in (0, 1, 0, 2, 0, 1):
        assert images.begin([Row(number, 0, 3, False)]) is not None
    assert tower.encoded == [0, 1, 2, 1]


def test_embeddings_that_are_kept_let_no_memory_grow() -> None:
    form = msgspec.structs.replace(FORM, height=896, width=896)
    arrays = [number.to_bytes(4, "big") * (form.array_bytes // 4) for number in range(60)]
    places = [ImageInput(sha256=hashlib.sha256(array).digest(), first=0, tokens=3) for array in arrays]

    def tower(pixels: torch.Tensor) -> torch.Tensor:
        """Return small embeddings, after large blocks of memory."""
        return (pixels.double() * 0.5).float().mean() + torch.arange(3000.0).view(1, 3, 1000)

    store = ImageStore(form)
    images = StepImages(tower, store, torch.device("cpu"), whole=True)
    sizes = []
    for number, (place, array) in enumerate(zip(places, arrays, strict=True)):
        assert store.add([place], [array]) == ""
        planned = PlannedImage(number=-1 - number, sha256=place.sha256, first=0, tokens=3)
        images.introduce([msgspec.structs.replace(slot(0), images=[planned])])
        assert images.begin([Row(0, 0, 3, False)]) is not None
        store.retain(())
        sizes.append(int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize())
    assert sizes[-1] - sizes[19] < 100 << 20, "each embedding keeps freed blocks from being used again"
