"""Images in prompts: equal ones hit the prefix cache, different ones never do, and some are never cut."""

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.protocol.messages.any_resolution import AnyResolution, PaddedSquare
from tercet.protocol.messages.media import FixedSize, ImageFormat, ImageInput
from tercet.protocol.messages.messages import TokenizedGenerateReqInput
from tercet.protocol.messages.values import Resume, pack_ints
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.images import ImageNumbers, PromptImages
from tercet.scheduler.core.plan import CacheGroup
from tercet.scheduler.core.window_pages import window_pages
from tercet.scheduler.testing import Driver, FakeExecutor, request, small_capacity

IMAGE, TOKENS = 49, 6
SIZE: dict[str, Any] = {"height": 2, "width": 3}
FORM = ImageFormat(size=FixedSize(**SIZE), patch=1, resample=2, marker="", token="", token_id=IMAGE, max_tokens=TOKENS)
CAT, DOG, BIRD = (bytes([number]) * 32 for number in (1, 2, 3))


def driver(
    *,
    whole: bool = True,
    budget: int = 64,
    overlap: int = 0,
    pages: int = 64,
    window: int = 0,
    snapshots: int | None = None,
    encode_steps: int = 1,
    **config: Any,
) -> Driver:
    """Return a scheduler; with a window, its window pages are the fewest that serve a choice."""
    capacity = small_capacity(pages=pages, images=FORM, whole_images=whole, snapshots=snapshots)
    if window:
        most = max(budget, capacity.slots) + capacity.excess_tokens
        least = window_pages(window, capacity.page_size, 1, most)
        groups = [CacheGroup("full", pages), CacheGroup("window", least, window)]
        capacity = msgspec.structs.replace(capacity, groups=groups)
    executor = FakeExecutor(capacity, encode_steps=encode_steps)
    return Driver(capacity, CoreConfig(token_budget=budget, **config), overlap=overlap, executor=executor)


def shown(rid: str, parts: Sequence[int | bytes], **more: Any) -> TokenizedGenerateReqInput:
    """Return a request for token ids and images."""
    prompt: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, bytes):
            images.append(ImageInput(sha256=part, first=len(prompt), tokens=TOKENS, **SIZE))
        prompt += [IMAGE] * TOKENS if isinstance(part, bytes) else [part]
    return request(rid, prompt, images=images, **{"max_new_tokens": 4, "ignore_eos": True, **more})


def run(core: Driver, *requests: TokenizedGenerateReqInput) -> None:
    core.send(*requests)
    core.run()
    for each in requests:
        for choice in range(each.sampling.n):
            assert core.output[each.rid, choice] == core.answer(each, choice)


def cached(core: Driver, asked: TokenizedGenerateReqInput) -> int:
    """Run a request, and return its cached tokens."""
    before = core.core.counters.cached_tokens
    run(core, asked)
    return core.core.counters.cached_tokens - before


def test_equal_prefixes_with_equal_images_hit() -> None:
    core = driver()
    parts = [1, 2, CAT, *range(3, 9), DOG, 9, 10, 11]
    assert cached(core, shown("first", parts)) == 0
    assert cached(core, shown("again", parts)) == 20, "all pages but that of the last token"
    assert cached(core, shown("before", [1, 2, CAT, *range(3, 9), BIRD, 9, 10, 11])) == 12, "the pages before the bird"


def test_a_prefix_that_ends_inside_an_image_hits() -> None:
    core = driver()
    run(core, shown("first", [1, CAT, 2]))
    assert cached(core, shown("inside", [1, CAT, 3, 4])) == 4


def test_different_images_never_hit() -> None:
    core = driver()
    for number, image in enumerate((CAT, DOG, CAT[:31] + b"\0", b"\0" + CAT[1:])):
        assert cached(core, shown(f"r{number}", [image, 1, 2])) == 0
    assert cached(core, request("text", [IMAGE] * TOKENS + [1, 2], max_new_tokens=1)) == 0
    assert cached(core, shown("salt", [CAT, 1, 2], salt="other")) == 0


def test_an_image_that_was_forgotten_gets_another_number() -> None:
    numbers = ImageNumbers(most=2)
    first = [numbers.of("", each) for each in (CAT, DOG, CAT, BIRD, CAT)]
    assert first == [-1, -2, -1, -3, -1]
    assert numbers.of("", DOG) == -4
    assert numbers.of("salt", CAT) == -5


@given(st.integers(0, 40), st.integers(1, 60), st.booleans())
def test_a_chunk_cuts_no_whole_image_and_is_never_empty(start: int, count: int, whole: bool) -> None:
    places = [ImageInput(sha256=CAT, first=first, tokens=TOKENS, **SIZE) for first in (3, 9, 20)]
    found = PromptImages(places, "", ImageNumbers(), whole=whole).chunk(start, count)
    assert found > 0
    assert abs(found - count) < TOKENS
    assert found == count if not whole else not any(p.first < start + found < p.first + TOKENS for p in places)


def test_ids_come_back_from_keys() -> None:
    places = [ImageInput(sha256=CAT, first=1, tokens=TOKENS, **SIZE)]
    images = PromptImages(places, "", ImageNumbers(), whole=True)
    tokens = array("i", [1, *[IMAGE] * TOKENS, 2])
    keys = tokens[:]
    images.write_keys(keys)
    assert list(keys) == [1, *[-1] * TOKENS, 2]
    assert images.with_ids(keys) == tokens


parts = st.lists(st.sampled_from([1, 2, 3, CAT, DOG, BIRD]), min_size=1, max_size=7)


@settings(max_examples=150, deadline=None)
@given(
    prompts=st.lists(st.tuples(parts, st.sampled_from(["", "a"]), st.integers(1, 2)), min_size=1, max_size=6),
    budget=st.integers(1, 24),
    overlap=st.integers(0, 1),
    pages=st.sampled_from([16, 24, 64]),
    whole=st.booleans(),
    draft_rows=st.sampled_from([0, 16]),
    window=st.sampled_from([0, 3, 8]),
    snapshots=st.sampled_from([None, 12]),
    encode_steps=st.integers(1, 3),
)
def test_any_mix_of_images_and_text_gets_its_own_answers(
    prompts: list[tuple[list[int | bytes], str, int]],
    budget: int,
    overlap: int,
    pages: int,
    whole: bool,
    draft_rows: int,
    window: int,
    snapshots: int | None,
    encode_steps: int,
) -> None:
    core = driver(
        whole=whole,
        budget=budget,
        overlap=overlap,
        pages=pages,
        draft_rows=draft_rows,
        window=0 if snapshots else window,
        snapshots=snapshots,
        encode_steps=encode_steps,
    )
    requests = [shown(f"r{i}", each, salt=salt, n=n) for i, (each, salt, n) in enumerate(prompts)]
    run(core, *requests, request("text", [1, 2, 3], max_new_tokens=9, ignore_eos=True))
    run(core, *[shown(f"again{i}", each, salt=salt, n=n) for i, (each, salt, n) in enumerate(prompts)])
    core.assert_empty()
    most = max(core.core.config.token_budget, core.core.capacity.slots)
    assert all(sum(row.count for row in plan.rows) < most + TOKENS for plan in core.plans)


def test_an_attempt_goes_on_only_with_the_same_images() -> None:
    core = driver()
    first = shown("r", [1, CAT, 2], max_new_tokens=8)
    core.send(first)
    for _ in range(3):
        core.step()
    sent = core.output["r", 0]
    resumed = {"resume": [Resume(0, pack_ints(sent))], "max_new_tokens": 8}
    core.send(shown("r", [1, CAT, 2], attempt=1, **resumed))
    core.run()
    assert core.output["r", 0] == core.answer(first)
    assert core.core.counters.prompt_tokens == 8, "the held choice went on"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"sha256": b"short"}, "no place"),
        ({"first": -1}, "no place"),
        ({"first": 9}, "no place"),
        ({"tokens": 5}, "not in the place"),
        ({"tokens": 0}, "no place"),
        ({"tokens": -3}, "no place"),
        ({"height": 4, "width": 3}, "size"),
        ({"height": 0}, "size"),
        ({"height": -2, "width": -3}, "size"),
        ({"first": 0}, "not in the place"),
        ({"original": (2, 3)}, "size"),
    ],
)
def test_images_out_of_place_are_rejected(change: dict[str, Any], why: str) -> None:
    core = driver()
    place = ImageInput(**{"sha256": CAT, "first": 1, "tokens": TOKENS, **SIZE, **change})
    core.send(request("r", [1, *[IMAGE] * TOKENS, 2], images=[place]))
    assert why in core.rejected["r"].message


ANY = ImageFormat(
    size=AnyResolution(tile=4, sizes=((4, 4), (4, 8)), max_tiles=9),
    several=PaddedSquare(side=4, background=(0, 0, 0)),
    patch=2,
    resample=3,
    marker="",
    token="",
    token_id=IMAGE,
    max_tokens=20,
)


@pytest.mark.parametrize(
    ("height", "original", "tokens", "why"),
    [
        (12, (5, 10), 14, ""),
        (12, (5, 10), 13, "not in the place"),
        (8, (4, 4), 10, ""),
        (4, (), 5, ""),
        (8, (), 10, "size"),
        (8, (5, 10), 14, "size"),
        (8, (4, 4, 4), 10, "size"),
        (8, (0, 4), 10, "size"),
        (8, (1 << 80, 4), 10, "size"),
    ],
)
def test_original_sizes_decide_how_many_tokens_an_image_has(
    height: int, original: tuple[int, ...], tokens: int, why: str
) -> None:
    core = Driver(small_capacity(images=ANY))
    place = ImageInput(sha256=CAT, height=height, width=4, first=1, tokens=tokens, original=original)
    core.send(request("r", [1, *[IMAGE] * tokens, 2], images=[place]))
    assert why in (core.rejected["r"].message if why else "")
    assert ("r" in core.rejected) == bool(why)


def test_images_have_rows_with_other_tokens_between_them() -> None:
    rows = [IMAGE, IMAGE, IMAGE, 7, IMAGE, IMAGE, IMAGE]
    place = ImageInput(sha256=CAT, first=1, tokens=len(rows), **SIZE)
    core = Driver(
        small_capacity(images=msgspec.structs.replace(FORM, max_tokens=len(rows))), CoreConfig(token_budget=4)
    )
    asked = request("r", [1, *rows, 2], images=[place], max_new_tokens=4, ignore_eos=True)
    run(core, asked)
    assert [bytes(init.tokens) for plan in core.plans for init in plan.introduce] == [asked.input_ids]
    core = driver(whole=False)
    core.send(asked)
    assert "size" in core.rejected["r"].message, "the image has more tokens than the model's images"


def test_two_images_in_one_place_are_rejected() -> None:
    core = driver()
    core.send(request("r", [IMAGE] * TOKENS, images=[ImageInput(sha256=CAT, first=0, tokens=TOKENS, **SIZE)] * 2))
    assert "no place" in core.rejected["r"].message


def test_a_scheduler_without_images_rejects_them() -> None:
    core = Driver(small_capacity())
    core.send(shown("r", [CAT, 1]))
    assert "takes no images" in core.rejected["r"].message


def test_the_core_lists_the_images_of_held_choices() -> None:
    core = driver()
    core.send(shown("r", [1, CAT, DOG]), shown("s", [CAT, 2]))
    assert core.core.media() == {CAT, DOG}
    core.run()
    assert core.core.media() == set()
