"""Images and audio are encoded for a share of the time that rows take."""

import hashlib
from array import array
from typing import Any

import pytest
import torch

from tercet.protocol.messages.media import ImageInput
from tercet.protocol.messages.values import SamplingParams
from tercet.scheduler.core.images import ALL_TOKENS, PlannedImage
from tercet.scheduler.core.plan import Plan, Row, SlotInit
from tercet.scheduler.device.time_slices import pause
from tercet.scheduler.executor.media.images import ImageStore, StepImages
from tercet.scheduler.executor.media.step_media import StepMedia

IMAGE, TOKENS, PARTS = 9, 3, 10
ARRAYS = [bytes([number]) * 9 for number in range(4)]
SIZE: dict[str, Any] = {"height": 1, "width": 3, "tokens": TOKENS}
ROWS = [Row(7, 0, 1, sample=True)]


class Clock:
    """A clock that moves only when work is done."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Tower:
    """A tower that computes for ten seconds, in ten parts."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.begun: list[int] = []
        self.parts = 0

    def __call__(self, array: torch.Tensor) -> torch.Tensor:
        self.begun.append(int(array[0, 0, 0]))
        for part in range(PARTS):
            if part:
                pause()
            self._clock.now += 1
            self.parts += 1
        return torch.zeros(TOKENS, 2)


class Steps:
    """Steps whose rows take ten seconds."""

    def __init__(self, *, sliced: bool = True) -> None:
        self.clock = Clock()
        self.tower = Tower(self.clock)
        self.store = ImageStore()
        images = StepImages(self.tower, self.store, IMAGE, torch.device("cpu"), whole=False)
        self.media = StepMedia(images, None, sliced=sliced, clock=self.clock)

    def introduce(self, slot: int, *numbers: int) -> None:
        """Introduce a choice with images, each after one token of text."""
        ids = array("i", [1, *[IMAGE] * TOKENS] * len(numbers))
        hashes = [hashlib.sha256(ARRAYS[number]).digest() for number in numbers]
        inputs = [ImageInput(sha256=each, first=0, **SIZE) for each in hashes]
        assert self.store.add(inputs, [ARRAYS[number] for number in numbers]) == ""
        planned = [
            PlannedImage(number=-1 - number, sha256=sha256, first=1 + at * (TOKENS + 1), **SIZE)
            for at, (number, sha256) in enumerate(zip(numbers, hashes, strict=True))
        ]
        sampling = SamplingParams(max_new_tokens=1)
        self.media.introduce(
            [SlotInit(slot=slot, tokens=ids.tobytes(), prompt_tokens=9, choice=0, sampling=sampling, images=planned)]
        )

    def step(self, encode: dict[int, int], rows: list[Row] = ROWS) -> tuple[int, dict[int, int]]:
        """Return the parts that a step encodes, and what its slots can read after it."""
        before = self.tower.parts
        readable = self.media.encode(Plan(step=0, rows=rows, encode=encode), spent=10.0)
        return self.tower.parts - before, readable


def test_each_step_encodes_for_half_the_time_of_its_rows() -> None:
    steps = Steps()
    steps.introduce(0, 1, 2)
    found = [steps.step({0: 0}) for _ in range(4)]
    assert found == [(5, {0: 1}), (5, {0: 5}), (5, {0: 5}), (5, {0: ALL_TOKENS})]
    assert steps.tower.begun == [1, 2]
    assert steps.step({0: 0}) == (0, {0: ALL_TOKENS})


def test_what_has_begun_is_ended_before_another_begins() -> None:
    steps = Steps()
    steps.introduce(0, 1)
    steps.introduce(1, 2)
    steps.step({0: 0, 1: 0})
    assert steps.step({1: 0, 0: 0}) == (5, {1: 1, 0: ALL_TOKENS})
    assert steps.step({1: 0})[0] == 5


def test_what_no_choice_needs_is_cancelled() -> None:
    steps = Steps()
    steps.introduce(0, 1)
    steps.introduce(1, 2)
    steps.step({0: 0, 1: 0})
    assert steps.step({1: 0}) == (5, {1: 1})
    assert steps.tower.begun == [1, 2]
    assert steps.step({1: 0}) == (5, {1: ALL_TOKENS})


def test_images_of_computed_tokens_are_left_out() -> None:
    steps = Steps()
    steps.introduce(0, 1, 2)
    assert steps.step({0: 4}) == (5, {0: 5})
    assert steps.tower.begun == [2]


def test_an_image_of_two_slots_is_encoded_once() -> None:
    steps = Steps()
    steps.introduce(0, 1)
    steps.introduce(1, 1)
    assert [steps.step({0: 0, 1: 0}) for _ in range(2)][-1] == (5, {0: ALL_TOKENS, 1: ALL_TOKENS})
    assert steps.tower.begun == [1]


def test_a_choice_whose_frames_are_gone_keeps_no_other_waiting() -> None:
    steps = Steps()
    steps.introduce(0, 1)
    steps.introduce(1, 2)
    steps.store.retain({hashlib.sha256(ARRAYS[2]).digest()})
    assert steps.step({0: 0, 1: 0}) == (5, {0: 1, 1: 1})
    assert steps.step({0: 0, 1: 0}) == (5, {0: 1, 1: ALL_TOKENS})


@pytest.mark.parametrize("rows", [ROWS, []])
def test_an_accelerator_encodes_one_image_whole_in_a_step(rows: list[Row]) -> None:
    steps = Steps(sliced=False)
    steps.introduce(0, 1, 2)
    assert steps.step({0: 0}, rows) == (PARTS, {0: 5})
    assert steps.step({0: 0}, rows) == (PARTS, {0: ALL_TOKENS})


def test_closing_ends_what_has_begun() -> None:
    steps = Steps()
    steps.introduce(0, 1)
    steps.step({0: 0})
    steps.media.close()
    assert steps.tower.parts == PARTS // 2
