"""Rows that are emitted together are those that would have been emitted one by one."""

import random

import pytest

from tercet.protocol.values import FinishReason, FinishType, Logprobs, pack_floats
from tercet.scheduler.core.outputs import Outgoing, Outputs
from tercet.scheduler.core.request import Req
from tercet.scheduler.testing import request


def choices(seed: int, odd: float) -> list[Req]:
    """Of two detokenizers; some begin an attempt, end, report log-probabilities, or have more to send than a token."""
    chance, reqs = random.Random(seed), []
    for number in range(40):
        asked = request(f"f0-{number}", [1, 2, 3], max_new_tokens=9)
        req = Req(asked, "f0", number % 3, [number, 7, 8][: 3 if chance.random() < odd else 1], number)
        req.detokenizer = f"d{chance.randrange(2)}"
        req.attempt, req.opened = chance.randrange(3), chance.random() >= odd
        req.sent = req.output_tokens if chance.random() < odd else 0
        if chance.random() < odd:
            req.finish = FinishReason(FinishType.LENGTH)
        if chance.random() < odd:
            req.token_logprobs = [Logprobs(pack_floats([-1.0]), 0, b"", b"")] * req.output_tokens
        reqs.append(req)
    return reqs


def emitted(reqs: list[Req], *, soon: bool) -> tuple[list[Outgoing], list[int]]:
    outputs = Outputs()
    for place, req in enumerate(reqs):
        if soon and place % 7:
            outputs.emit_soon(req)
        else:
            outputs.emit(req)
        if place % 9 == 0:
            outputs.close(req)
    return outputs.take(), [req.sent for req in reqs]


@pytest.mark.parametrize("odd", [0.0, 0.03, 0.2])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_emitted_soon_is_what_would_have_been_emitted_at_once(seed: int, odd: float) -> None:
    assert emitted(choices(seed, odd), soon=True) == emitted(choices(seed, odd), soon=False)


def test_nothing_is_taken_as_nothing() -> None:
    assert Outputs().take() == []
