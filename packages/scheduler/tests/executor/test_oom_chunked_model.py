import logging
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from tercet.kernels.ops.recurrent import Segments
from tercet.scheduler.device.oom import SplitOnOom
from tercet.scheduler.executor.chunked_model import OomChunkedModel

FIRST = [(0, 1, 1), (1, 5, 5), (2, 3, 3)]
MIXED = [(0, 1, 2), (1, 7, 12), (2, 4, 7), (3, 9, 9)]


class Small:
    """A device with room for `room` tokens a step."""

    def __init__(self, model: Any, room: int) -> None:
        self.model = model
        self.room = room
        self.tried: list[int] = []

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> torch.Tensor:
        self.tried.append(len(input_ids))
        if len(input_ids) > self.room:
            raise torch.OutOfMemoryError
        result: torch.Tensor = self.model(input_ids, positions, batch)
        return result

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.model.compute_logits(hidden)
        return result


@pytest.mark.parametrize("room", [1, 3, 10, 100])
def test_a_step_in_parts_gives_the_same(room: int, attending: Any, steps: Any) -> None:
    plain, small = steps(), steps()
    released: list[int] = []
    model = OomChunkedModel(Small(attending, room), lambda: released.append(1))
    for rows in (FIRST, MIXED):
        expected_batch, batch = plain.step(rows), small.step(rows)
        expected = attending(expected_batch.input_ids, expected_batch.positions, expected_batch)
        torch.testing.assert_close(model(batch.input_ids, batch.positions, batch), expected)
    assert bool(released) == (room < 21)
    assert torch.equal(model.compute_logits(expected), attending.compute_logits(expected))
    for mine, theirs in zip(small.pool.layer(0), plain.pool.layer(0), strict=True):
        assert torch.equal(mine, theirs)


def test_what_failed_once_is_not_tried_again(attending: Any, steps: Any, caplog: pytest.LogCaptureFixture) -> None:
    device = Small(attending, 10)
    model = OomChunkedModel(device, lambda: None)
    given = steps()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            batch = given.step([(0, 12, 12), (1, 8, 8)])
            model(batch.input_ids, batch.positions, batch)
    assert device.tried == [20, 20, 10, 10, 10, 10]
    assert [message for message in caplog.messages if "step" in message] == [
        "out of memory for 20 tokens of a step at once, splitting into at most 10 for a while"
    ]


def test_a_step_over_recurrent_states_is_not_repeated(attending: Any, steps: Any) -> None:
    """A second attempt would advance the states again."""
    device = Small(attending, 10)
    batch = replace(steps().step([(0, 12, 12), (1, 8, 8)]), segments=Segments(torch.tensor([]), ()))
    with pytest.raises(torch.OutOfMemoryError):
        OomChunkedModel(device, lambda: None)(batch.input_ids, batch.positions, batch)
    assert device.tried == [20]


def test_a_limit_is_forgotten(attending: Any, steps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Small(attending, 10)
    model = OomChunkedModel(device, lambda: None)
    monkeypatch.setattr(model, "_in_halves", SplitOnOom("tokens", lambda: None, retry_after=3))
    given = steps()
    for room in (10, 10, 100, 100):
        device.room = room
        batch = given.step([(0, 12, 12), (1, 8, 8)])
        model(batch.input_ids, batch.positions, batch)
    assert device.tried == [20, 20, 10, 10, 10, 10, 20, 20]


class Hiccup(Small):
    """A device that once has no memory."""

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> torch.Tensor:
        try:
            return super().__call__(input_ids, positions, batch)
        finally:
            self.room = 100


def test_what_is_over_when_memory_was_given_back_limits_nothing(attending: Any, steps: Any) -> None:
    device = Hiccup(attending, 1)
    model = OomChunkedModel(device, lambda: None)
    given = steps()
    for rows in ([(0, 1, 1), (1, 1, 1)], [(0, 12, 13), (1, 8, 9)]):
        batch = given.step(rows)
        model(batch.input_ids, batch.positions, batch)
    assert device.tried == [2, 2, 20]


class Scarce(torch.Tensor):
    """A tensor of which the first joining finds no memory."""

    fails: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in cls.fails:
            cls.fails.remove(func)
            raise torch.OutOfMemoryError
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


class Wrapping(Small):
    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> torch.Tensor:
        return super().__call__(input_ids, positions, batch).as_subclass(Scarce)


def test_parts_are_put_together_when_memory_was_given_back(attending: Any, steps: Any) -> None:
    plain, small = steps(), steps()
    expected_batch, batch = plain.step(MIXED), small.step(MIXED)
    expected = attending(expected_batch.input_ids, expected_batch.positions, expected_batch)
    Scarce.fails = [torch.cat]
    actual = OomChunkedModel(Wrapping(attending, 11), lambda: None)(batch.input_ids, batch.positions, batch)
    torch.testing.assert_close(actual.as_subclass(torch.Tensor), expected)
    assert not Scarce.fails


def test_no_memory_for_one_token_is_an_error(attending: Any, steps: Any) -> None:
    batch = steps().step([(0, 1, 1)])
    with pytest.raises(torch.OutOfMemoryError):
        OomChunkedModel(Small(attending, 0), lambda: None)(batch.input_ids, batch.positions, batch)


class Full(Small):
    """A device that has room for logits only once memory was given back."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.tried.append(len(hidden))
        if self.room == 0:
            raise torch.OutOfMemoryError
        return super().compute_logits(hidden)


def test_logits_are_computed_when_memory_was_given_back(attending: Any) -> None:
    full = Full(attending, 0)
    hidden = torch.randn(3, 8)

    def release() -> None:
        full.room = 100

    assert torch.equal(OomChunkedModel(full, release).compute_logits(hidden), attending.compute_logits(hidden))
    full.room = 0
    with pytest.raises(torch.OutOfMemoryError):
        OomChunkedModel(full, lambda: None).compute_logits(hidden)
