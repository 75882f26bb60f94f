"""Native draws are those of the reference, token for token, in every instruction set."""

import math

import pytest
import torch

from packages.kernels.tests.pairwise import alternating
from tercet.kernels.native.ops import NativeOps
from tercet.kernels.ops.philox import NoiseKey
from tercet.kernels.ops.sampling import Filters, sample

FILTERS: list[dict[str, float]] = [
    {},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 700},
    {"top_k": 10**9},
    {"top_p": 0.0},
    {"top_p": 0.31},
    {"top_p": 0.93},
    {"top_p": 0.99999},
    {"min_p": 0.2},
    {"min_p": 1e-4},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.77},
    {"top_k": 3000, "top_p": 0.95, "min_p": 0.01},
]
"""One of each row."""


def filters_of(rows: list[dict[str, float]]) -> Filters:
    return Filters(
        torch.tensor([int(row.get("top_k", 0)) for row in rows]),
        torch.tensor([row.get("top_p", 1.0) for row in rows]),
        torch.tensor([row.get("min_p", 0.0) for row in rows]),
    )


def noise_of(rows: int, seed: int = 0) -> NoiseKey:
    generator = torch.Generator().manual_seed(seed)
    return NoiseKey(*torch.randint(0, 1 << 32, (4, rows), generator=generator))


@pytest.mark.parametrize(("vocab", "spread"), alternating([1, 7, 37, 1000, 12_007], [0.0, 0.05, 2.5, 40.0]))
def test_draws_what_the_reference_draws(native: NativeOps, vocab: int, spread: float) -> None:
    rows = len(FILTERS)
    for temperature in (0.02, 1.0, 3.0):
        seed = vocab + int(100 * spread + 10 * temperature)
        logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread
        logits[:, ::9] = -torch.inf
        logits[:, vocab // 2] = 0.25  # at least one has a chance
        temperatures, noise = torch.full((rows,), temperature), noise_of(rows, seed)
        filters = filters_of(FILTERS)
        expected = sample(logits, temperatures, filters, noise)
        assert native.sample(logits, temperatures, filters, noise).tolist() == expected.tolist()
        assert torch.equal(native.sample(logits, temperatures, None, noise), sample(logits, temperatures, None, noise))


def test_equal_logits_are_kept_by_id(native: NativeOps) -> None:
    logits = torch.randint(0, 4, (200, 300), generator=torch.Generator().manual_seed(3)).float()
    kinds: list[dict[str, float]] = [
        {"top_k": 9},
        {"top_k": 100},
        {"top_p": 0.5},
        {"min_p": 0.3},
        {"top_k": 80, "top_p": 0.6},
    ]
    rows = [kinds[row % len(kinds)] for row in range(len(logits))]
    drawn = native.sample(logits, torch.ones(200), filters_of(rows), noise_of(200))
    assert torch.equal(drawn, sample(logits, torch.ones(200), filters_of(rows), noise_of(200)))
    kept = [logits[row].sort(descending=True, stable=True).indices[:9].tolist() for row in range(0, 200, 5)]
    assert all(token in ids for token, ids in zip(drawn[::5].tolist(), kept, strict=True))


def test_tokens_of_probability_zero_are_never_drawn(native: NativeOps) -> None:
    logits = torch.full((7, 30), -math.inf)
    logits[0, 3] = -5.0
    logits[2, 4] = math.nan
    logits[3] = math.inf
    logits[4, [4, 9]] = 1.0
    logits[5:] = 1.0
    logits[5, 7], logits[6, 7] = math.inf, math.nan
    for filters in (None, filters_of([{"top_p": 0.9}] * 7)):
        tokens = native.sample(logits, torch.ones(7), filters, noise_of(7)).tolist()
        assert tokens[:4] == [3, -1, -1, -1]
        assert tokens[4] in {4, 9}
        assert tokens[5:] == [-1, -1]


def test_the_coldest_temperature_is_greedy(native: NativeOps) -> None:
    logits = torch.tensor([[1e4, -3e4, 1.0, 9.999e3]] * 3)
    assert native.sample(logits, torch.tensor([1e-45, 1e-30, 1e-6]), None, noise_of(3)).tolist() == [0, 0, 0]


def test_a_temperature_that_is_no_number_draws_nothing(native: NativeOps) -> None:
    temperature = torch.tensor([1e-6, math.nan, 1e-6])
    assert native.sample(torch.tensor([[0.0, 1.0, -2.0]] * 3), temperature, None, noise_of(3)).tolist() == [1, -1, 1]


def test_wrong_shapes_are_refused(native: NativeOps) -> None:
    with pytest.raises(ValueError, match="noise for 2 rows"):
        native.sample(torch.zeros(3, 5), torch.ones(3), None, noise_of(2))
    with pytest.raises(ValueError, match="expected shape"):
        native.sample(torch.zeros(3, 5), torch.ones(2), None, noise_of(3))
    with pytest.raises(TypeError, match="float32"):
        native.sample(torch.zeros(3, 5).bfloat16(), torch.ones(3), None, noise_of(3))
