"""Bounds on the state that a client's request may cause."""

import msgspec
import pytest

from tercet.detokenizer.choice import MAX_PROMPT_TAIL, MAX_STOP_CHARS, MAX_STOPS, DecodePlan
from tercet.detokenizer.errors import SpecError
from tercet.protocol.messages.messages import DecodeSpec
from tercet.protocol.messages.values import pack_ints


def spec(stop: list[str], tail: int = 0) -> bytes:
    return msgspec.msgpack.encode(DecodeSpec(stop=stop, prompt_tail=pack_ints([1] * tail)))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (spec(["a"] * (MAX_STOPS + 1)), "more than 64 stop strings"),
        (spec(["a" * (MAX_STOP_CHARS + 1)]), "more than 4096 characters"),
        (spec([], MAX_PROMPT_TAIL + 1), "more than 1024 ids"),
    ],
    ids=["stops", "characters", "tail"],
)
def test_a_spec_is_bounded(given: bytes, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        DecodePlan(given)


def test_a_spec_at_its_bounds_is_taken() -> None:
    stops = ["a" * (MAX_STOP_CHARS // MAX_STOPS)] * MAX_STOPS
    assert DecodePlan(spec(stops, MAX_PROMPT_TAIL)).stops is not None
