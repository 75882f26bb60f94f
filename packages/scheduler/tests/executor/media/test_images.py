"""Arrays and embeddings of images are kept within bounds, as long as they are needed."""

import hashlib
import resource
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.protocol.messages.media import ImageInput
from tercet.protocol.messages.values import SamplingParams
from tercet.scheduler.core.images import PlannedImage
from tercet.scheduler.core.plan import Row, SlotInit
from tercet.scheduler.executor.media.embedding_cache import EmbeddingCache
from tercet.scheduler.executor.media.images import ImageStore, StepImages

IMAGE, HEIGHT, WIDTH = 9, 1, 3
ARRAYS = [bytes([number]) * (3 * HEIGHT * WIDTH) for number in range(4)]
HASHES = [hashlib.sha256(each).digest() for each in ARRAYS]


def inputs(*numbers: int) -> list[ImageInput]:
    return [ImageInput(sha256=HASHES[each], height=HEIGHT, width=WIDTH, first=0, tokens=3) for each in numbers]


def planned(number: int, first: int = 0, tokens: int = 3) -> PlannedImage:
    return PlannedImage(
        number=-1 - number, sha256=HASHES[number], height=HEIGHT, width=WIDTH, first=first, tokens=tokens
    )


def store_of(*numbers: int) -> ImageStore:
    store = ImageStore()
    assert store.add(inputs(*numbers), [ARRAYS[each] for each in numbers]) == ""
    return store


def test_arrays_that_do_not_fit_are_refused() -> None:
    store = ImageStore(most_bytes=2 * len(ARRAYS[0]))
    assert "do not fit" in store.add(inputs(0), [])
    assert "do not fit" in store.add(inputs(0), [ARRAYS[0], ARRAYS[1]])
    assert "do not fit" in store.add(inputs(0), [ARRAYS[0][1:]])
    assert store.add(inputs(0, 1), [memoryview(ARRAYS[0]), ARRAYS[1]]) == ""
    assert store.add(inputs(1), [ARRAYS[1]]) == "", "it is there already"
    assert "too many" in store.add(inputs(2), [ARRAYS[2]])
    store.retain({HASHES[0]})
    assert store.add(inputs(2), [ARRAYS[2]]) == ""
    with pytest.raises(KeyError):
        store.array(planned(1))


class Tower:
    """A tower whose embeddings are the first value of an array."""

    def __init__(self) -> None:
        self.encoded: list[int] = []

    def __call__(self, array: torch.Tensor) -> torch.Tensor:
        assert array.shape == (HEIGHT, WIDTH, 3)
        self.encoded.append(int(array[0, 0, 0]))
        return array[0, 0, 0].float() + torch.arange(3).view(3, 1) / 10


def slot(number: int, *images: tuple[int, int]) -> SlotInit:
    """Return a choice with images (number, first token)."""
    ids = array("i", [1] * 9)
    for _, first in images:
        ids[first : first + 3] = array("i", [IMAGE] * 3)
    places = [planned(each, first) for each, first in images]
    sampling = SamplingParams(max_new_tokens=1)
    return SlotInit(slot=number, tokens=ids.tobytes(), prompt_tokens=9, choice=0, sampling=sampling, images=places)


@pytest.mark.parametrize("whole", [True, False])
def test_embeddings_are_in_the_places_of_their_tokens(whole: bool) -> None:
    tower = Tower()
    images = StepImages(tower, store_of(1, 2), IMAGE, torch.device("cpu"), whole=whole)
    for init in (slot(0, (1, 2), (2, 6)), slot(1), slot(2, (2, 0))):
        images.introduce(init)
    rows = [Row(1, 8, 1, True), Row(0, 3, 6, False), Row(2, 0, 4, False)]
    found = images.embeddings(rows)
    assert found is not None
    assert found.places.tolist() == [1, 2, 4, 5, 6, 7, 8, 9]
    assert found.vectors.flatten().tolist() == pytest.approx([1.1, 1.2, 2.0, 2.1, 2.2, 2.0, 2.1, 2.2])
    assert sorted(tower.encoded) == [1, 2], "an image of two choices is encoded once"
    seen = [9, 5, 5, 6, 9, 9, 9, 3, 3, 3, 4] if whole else None
    assert (None if found.seen is None else found.seen.tolist()) == seen
    assert images.embeddings([Row(1, 9, 1, True), Row(0, 9, 1, True)]) is None
    images.introduce(slot(0))
    assert images.embeddings([Row(0, 0, 9, False)]) is None


def test_tokens_between_the_placeholders_of_an_image_keep_their_embeddings() -> None:
    tower = Tower()
    images = StepImages(tower, store_of(1), IMAGE, torch.device("cpu"), whole=False)
    ids = array("i", [1, IMAGE, 2, IMAGE, 3, IMAGE, 4])
    init = msgspec.structs.replace(slot(0), tokens=ids.tobytes(), images=[planned(1, first=1, tokens=5)])
    images.introduce(init)
    first, second = images.embeddings([Row(0, 0, 4, False)]), images.embeddings([Row(0, 4, 3, True)])
    assert first is not None
    assert second is not None
    assert (first.places.tolist(), second.places.tolist()) == ([1, 3], [1])
    assert first.vectors.flatten().tolist() == pytest.approx([1.0, 1.1])
    assert second.vectors.flatten().tolist() == pytest.approx([1.2])
    assert tower.encoded == [1], "a chunk ends inside the image"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 200)), max_size=60), st.integers(1, 5))
def test_the_cache_returns_the_embeddings_that_it_got(images: list[tuple[int, int]], pages: int) -> None:
    cache = EmbeddingCache(pages * 64 * 4 * 2)
    sizes: dict[int, int] = {}
    for number, count in images:
        size = sizes.setdefault(number, count)
        expected = torch.full((size, 2), float(number)) + torch.arange(size).view(-1, 1)
        if cache.get(number, slice(0, 1)) is None:
            cache.add(number, expected)
        found = cache.get(number, slice(size // 3, size))
        assert (found is None) == (size > pages * 64)
        assert found is None or torch.equal(found, expected[size // 3 :])


def test_the_cache_has_room_for_the_largest_image() -> None:
    cache = EmbeddingCache(1, largest=130)
    embeddings = torch.randn(130, 2)
    cache.add(-1, embeddings)
    kept = cache.get(-1, slice(0, 130))
    assert kept is not None
    assert torch.equal(kept, embeddings)


def test_embeddings_used_last_are_kept_within_the_bound() -> None:
    tower = Tower()
    images = StepImages(tower, store_of(0, 1, 2), IMAGE, torch.device("cpu"), whole=True, most_bytes=2 * 64 * 4)
    for number in range(3):
        images.introduce(slot(number, (number, 0)))
    for number in (0, 1, 0, 2, 0, 1):
        assert images.embeddings([Row(number, 0, 3, False)]) is not None
    assert tower.encoded == [0, 1, 2, 1]


def test_embeddings_that_are_kept_let_no_memory_grow() -> None:
    side = 896
    arrays = [number.to_bytes(4, "big") * (3 * side * side // 4) for number in range(60)]
    sizes: dict[str, Any] = {"height": side, "width": side, "first": 0, "tokens": 3}
    places = [ImageInput(sha256=hashlib.sha256(each).digest(), **sizes) for each in arrays]

    def tower(pixels: torch.Tensor) -> torch.Tensor:
        """Return small embeddings, after large blocks of memory."""
        return (pixels.double() * 0.5).float().mean() + torch.arange(3000.0).view(3, 1000)

    store = ImageStore()
    images = StepImages(tower, store, IMAGE, torch.device("cpu"), whole=True)
    resident = []
    for number, (place, each) in enumerate(zip(places, arrays, strict=True)):
        assert store.add([place], [each]) == ""
        shown = PlannedImage(number=-1 - number, sha256=place.sha256, **sizes)
        images.introduce(msgspec.structs.replace(slot(0, (0, 0)), images=[shown]))
        assert images.embeddings([Row(0, 0, 3, False)]) is not None
        store.retain(())
        resident.append(int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize())
    assert resident[-1] - resident[19] < 100 << 20, "each embedding keeps freed blocks from being used again"
