"""Rows that assume tokens are penalised for these, too, and only what was right is counted."""

import itertools
import random
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from packages.scheduler.tests.executor.sampling.test_sampler import KINDS, VOCAB, init, logits_of
from tercet.scheduler.device.staging import HostToDevice
from tercet.scheduler.executor.sampling.draft_penalties import DraftTokens
from tercet.scheduler.executor.sampling.sampler import Sampler, join_sampled

CPU = torch.device("cpu")
PENALISED = ["repetition", "frequency", "presence", "everything"]
STEPS = 14
OFTEN = {"repetition", "everything"}
"""Kinds of an ordinary run: one that depends on whether a token came before, and one on how often."""
CASES = [
    pytest.param(kind, parts, seed, marks=() if number % 3 == seed and kind in OFTEN else pytest.mark.slow)
    for number, (kind, parts) in enumerate(itertools.product(PENALISED, [1, 2]))
    for seed in range(3)
]


@cache
def one_by_one(kind: str, ops: Any) -> list[int]:
    sampler = Sampler(1, VOCAB, CPU, ops)
    sampler.introduce([init(0, **KINDS[kind])])
    return [int(sampler.sample(logits_of(step, 1), [0], [step]).tokens) for step in range(STEPS)]


@pytest.mark.parametrize(("kind", "parts", "seed"), CASES)
def test_tokens_that_are_assumed_rightly_change_nothing(kind: str, parts: int, seed: int, ops: Any) -> None:
    """Beside a choice without penalties that assumes some, too, and one that assumes none. Some tokens are wrong."""
    chance = random.Random(seed)
    kinds = [kind, "plain", "presence"]
    truth = one_by_one(kind, ops)
    sampler = Sampler(3, VOCAB, CPU, ops)
    inits = [init(slot, **KINDS[each]) for slot, each in enumerate(kinds)]
    sampler.introduce(inits)
    said: list[int] = []
    others = 0
    while len(said) < STEPS:
        wanted = min(chance.randrange(5), STEPS - len(said) - 1)
        told = [truth[len(said) + more] for more in range(wanted)]
        if told and chance.random() < 0.4:
            place = chance.randrange(len(told))
            told[place] = (told[place] + 1) % VOCAB
        slots = [2, 0, 1, *[0] * len(told), 1, 1]
        assumed: list[int | None] = [None, None, None, *told, 3, 3]
        positions = [others, len(said), 0, *(len(said) + 1 + more for more in range(len(told))), 1, 2]
        logits = torch.cat([logits_of(position, 1) for position in positions])
        drafts = DraftTokens(slots, assumed)
        cuts = [0, len(slots) // 2, len(slots)] if parts == 2 else [0, len(slots)]
        sampled = join_sampled(
            [
                sampler.sample(
                    logits[first:last].clone(), slots[first:last], positions[first:last], drafts=drafts, first=first
                )
                for first, last in itertools.pairwise(cuts)
            ]
        ).tokens
        sampler.count_accepted(slots, sampled, drafts)
        others += 1
        tokens = sampled.tolist()
        said.append(tokens[1])
        for row, token in enumerate(told, start=3):
            if said[-1] != token:
                break
            said.append(tokens[row])
    assert said == truth


def test_which_rows_were_assumed_rightly() -> None:
    #            0  1  2     3  4  5     6  7
    slots = [5, 1, 2, 5, 5, 5, 2, 2]
    assumed = [None, None, None, 10, 11, 12, 20, 21]
    drafts = DraftTokens(slots, assumed)
    assert drafts.tokens == [[], [], [], [10], [10, 11], [10, 11, 12], [20], [20, 21]]
    cases: list[tuple[dict[int, int], list[int]]] = [
        ({0: 10, 3: 11, 4: 12, 2: 20, 6: 21}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({0: 10, 3: 99, 4: 12, 2: 20, 6: 21}, [0, 1, 2, 3, 6, 7]),
        ({0: 99, 3: 11, 4: 12, 2: 99, 6: 21}, [0, 1, 2]),
        ({0: 10, 3: 11, 4: 99, 2: 20, 6: 99}, [0, 1, 2, 3, 4, 6]),
        ({0: -1, 3: -1, 2: 20}, [0, 1, 2, 6]),
    ]
    for given, right in cases:
        sampled = torch.tensor([given.get(row, 0) for row in range(len(slots))])
        assert drafts.right(sampled, HostToDevice(CPU)).nonzero()[:, 0].tolist() == right


def test_tokens_ahead_are_counted_as_often_as_they_come() -> None:
    drafts = DraftTokens([0, 1, 0, 0, 0], [None, None, 4, 4, 7])
    assert drafts.repeated(np.array([1]), 0) is None
    found = drafts.repeated(np.array([0, 2, 3]), 1)
    assert found is not None
    columns = (each.tolist() for each in (found.rows, found.places, found.tokens, found.times))
    assert list(zip(*columns, strict=True)) == [(2, 1, [4, 4, 4], [2, 2, 2]), (3, 2, [4, 4, 7], [2, 2, 1])]
