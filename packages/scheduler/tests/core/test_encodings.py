"""Images and audio are encoded beside the rows of others, and read only when they are encoded."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.protocol.messages.audio import AudioInput
from tercet.protocol.messages.media import FixedSize, ImageFormat, ImageInput
from tercet.protocol.messages.messages import AbortReq, TokenizedGenerateReqInput
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.plan import Plan
from tercet.scheduler.testing import Driver, FakeExecutor, request, small_capacity

IMAGE, TOKENS = 49, 6
SIZE: dict[str, Any] = {"height": 2, "width": 3}
FORM = ImageFormat(size=FixedSize(**SIZE), patch=1, resample=2, marker="", token="", token_id=IMAGE, max_tokens=TOKENS)
CAT, DOG, BIRD = (bytes([number]) * 32 for number in (1, 2, 3))


def driver(*, overlap: int = 0, pages: int = 64, slots: int = 8, encode_steps: int = 4, **config: Any) -> Driver:
    capacity = small_capacity(pages=pages, slots=slots, images=FORM)
    executor = FakeExecutor(capacity, encode_steps=encode_steps)
    return Driver(capacity, CoreConfig(token_budget=64, **config), overlap=overlap, executor=executor)


def shown(rid: str, parts: Sequence[int | bytes], **more: Any) -> TokenizedGenerateReqInput:
    """Return a request for token ids and images."""
    prompt: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, bytes):
            images.append(ImageInput(sha256=part, first=len(prompt), tokens=TOKENS, **SIZE))
        prompt += [IMAGE] * TOKENS if isinstance(part, bytes) else [part]
    return request(rid, prompt, images=images, **{"max_new_tokens": 4, "ignore_eos": True, **more})


def finish(core: Driver, *requests: TokenizedGenerateReqInput) -> None:
    """Run to the end, and check the answers."""
    core.run()
    for each in requests:
        for choice in range(each.sampling.n):
            assert core.output[each.rid, choice] == core.answer(each, choice)
    core.assert_empty()


def rows(plan: Plan) -> list[tuple[int, int]]:
    return [(row.start, row.count) for row in plan.rows]


@pytest.mark.parametrize("overlap", [0, 1])
def test_text_goes_on_while_an_image_is_encoded(overlap: int) -> None:
    core = driver(overlap=overlap)
    text = request("text", [1, 2], max_new_tokens=12, ignore_eos=True)
    core.send(text)
    core.step()
    image = shown("image", [1, 2, CAT, 3])
    core.send(image)
    finish(core, text, image)
    encoding = [plan for plan in core.plans if plan.encode]
    assert len(encoding) >= 4
    assert all(plan.rows for plan in encoding), "no step of the text waits for the image"
    assert rows(encoding[0])[-1] == (0, 2), "the text before the image is computed at once"


def test_an_image_alone_is_encoded_in_steps_without_rows() -> None:
    core = driver(encode_steps=3)
    image = shown("image", [CAT, 1, DOG, 2])
    core.send(image)
    finish(core, image)
    assert [rows(plan) for plan in core.plans[:6]] == [[], [], [], [(0, 7)], [], []]
    assert [dict(plan.encode) for plan in core.plans[:7]] == [{0: 0}] * 3 + [{0: 7}] * 3 + [{}]


def test_cached_images_are_not_encoded_again() -> None:
    core = driver()
    first = shown("first", [CAT, 1, 2, 3])
    core.send(first)
    finish(core, first)
    before = len(core.plans)
    again = shown("again", [CAT, 1, 2, DOG, 4])
    core.send(again)
    finish(core, again)
    assert core.plans[before].encode == {0: 8}
    text = shown("text", [CAT, 1, 2, 3, 5])
    before = len(core.plans)
    core.send(text)
    finish(core, text)
    assert not any(plan.encode for plan in core.plans[before:])


def test_tenants_take_turns() -> None:
    core = driver(encode_steps=2)
    many = [shown(f"many{number}", [bytes([number + 9]) * 32, 1], tenant="a") for number in range(4)]
    one = shown("one", [CAT, 2], tenant="b")
    core.send(*many, one)
    orders: list[dict[int, int]] = []
    while len(core.finishes) < 5:
        core.step()
        if core.plans[-1].encode and core.plans[-1].encode != (orders or [{}])[-1]:
            orders.append(core.plans[-1].encode)
        if ("one", 0) in core.finishes:
            break
    assert ("one", 0) in core.finishes
    assert len(core.finishes) <= 3, "the image of another key is the second or third to be encoded"
    finish(core, *many, one)


@pytest.mark.parametrize("overlap", [0, 1])
def test_an_aborted_choice_is_encoded_no_further(overlap: int) -> None:
    core = driver(overlap=overlap, slots=1, encode_steps=50)
    core.send(shown("gone", [CAT, 1]))
    core.step()
    core.step()
    core.send(AbortReq(rid="gone"))
    text = request("text", [1, 2], ignore_eos=True)
    core.send(text)
    finish(core, text)
    assert sum(bool(plan.encode) for plan in core.plans) <= 3


def test_audio_is_encoded_before_any_row() -> None:
    capacity = small_capacity(audio=2)
    core = Driver(capacity, CoreConfig(token_budget=64), executor=FakeExecutor(capacity, encode_steps=3))
    asked = request("a", [1, 2, 3], audio=AudioInput(sha256=b"a" * 32), n=2, ignore_eos=True)
    core.send(asked)
    finish(core, asked)
    assert [bool(plan.rows) for plan in core.plans[:4]] == [False, False, False, True]


parts = st.lists(st.sampled_from([1, 2, CAT, DOG, BIRD]), min_size=1, max_size=5)


@settings(max_examples=120, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(parts, st.sampled_from("ab"), st.integers(1, 2), st.integers(0, 4), st.booleans()), max_size=8
    ),
    overlap=st.integers(0, 2),
    pages=st.sampled_from([12, 24, 64]),
    slots=st.integers(1, 4),
    encode_steps=st.integers(1, 5),
)
def test_aborts_and_retractions_disturb_no_other_choice(
    prompts: list[Any], overlap: int, pages: int, slots: int, encode_steps: int
) -> None:
    core = driver(overlap=overlap, pages=pages, slots=slots, encode_steps=encode_steps, reserve=0.0, reserve_floor=0.0)
    kept = []
    for number, (made_of, tenant, n, turns, aborted) in enumerate(prompts):
        asked = shown(f"r{number}", made_of, n=n, tenant=tenant, max_new_tokens=7)
        core.send(asked)
        for _ in range(turns):
            core.step()
        if aborted:
            core.send(AbortReq(rid=asked.rid))
        else:
            kept.append(asked)
    core.run()
    for each in kept:
        for choice in range(each.sampling.n):
            assert core.output[each.rid, choice] == core.answer(each, choice)
    core.assert_empty()
