"""Sampling against a slow reference that shares no code with it but the noise."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.kernels.ops.philox import NoiseKey, gumbel_reference
from tercet.kernels.ops.sampling import Filters, argmax, sample, top_candidates


@dataclass(frozen=True)
class Row:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    position: int = 0


def draw(logits: torch.Tensor, rows: list[Row], *, filtered: bool = True) -> list[int]:
    filters = Filters(
        torch.tensor([row.top_k for row in rows]),
        torch.tensor([row.top_p for row in rows]),
        torch.tensor([row.min_p for row in rows]),
    )
    noise = NoiseKey(
        torch.tensor([row.seed & 0xFFFFFFFF for row in rows]),
        torch.tensor([row.seed >> 32 for row in rows]),
        torch.tensor([row.choice for row in rows]),
        torch.tensor([row.position for row in rows]),
    )
    temperature = torch.tensor([row.temperature for row in rows])
    return sample(logits, temperature, filters if filtered else None, noise).tolist()


def kept(logits: list[float], row: Row) -> dict[int, float]:
    """Which tokens the filters keep, and their renormalised probabilities, by the book and in float64."""
    scaled = {token: logit / row.temperature for token, logit in enumerate(logits) if logit > -math.inf}
    order = sorted(scaled, key=lambda token: (-scaled[token], token))
    if row.top_k:
        order = order[: row.top_k]
    highest = scaled[order[0]]
    weight = {token: math.exp(scaled[token] - highest) for token in order}
    total = sum(weight.values())
    if row.top_p < 1:
        chosen, mass = [], 0.0
        for token in order:
            chosen.append(token)
            mass += weight[token] / total
            if mass >= row.top_p:
                break
        order = chosen
    order = [token for token in order if weight[token] >= row.min_p]
    total = sum(weight[token] for token in order)
    return {token: weight[token] / total for token in order}


def expected(logits: list[float], row: Row) -> int:
    """The Gumbel-max draw over the kept tokens, one noise at a time."""
    scores = {
        token: math.log(probability) + gumbel_reference(row.seed, row.choice, row.position, token)
        for token, probability in kept(logits, row).items()
    }
    return max(scores, key=lambda token: (scores[token], -token))


rows_strategy = st.builds(
    Row,
    temperature=st.sampled_from([0.125, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 40, 10_000]),
    top_p=st.sampled_from([0.03, 0.37, 0.81, 0.97, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.011, 0.23, 0.93]),
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 127),
    position=st.integers(0, 200_000),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(rows=st.lists(rows_strategy, min_size=1, max_size=4), spread=st.sampled_from([0.1, 3.0, 12.0]))
def test_draws_what_the_slow_reference_draws(rows: list[Row], spread: float) -> None:
    vocab = 61
    generator = torch.Generator().manual_seed(len(rows) + int(10 * spread))
    logits = torch.randn(len(rows), vocab, generator=generator) * spread
    assert draw(logits, rows) == [expected(logits[i].tolist(), row) for i, row in enumerate(rows)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**64 - 1), spread=st.sampled_from([0.0, 1.0, 8.0, 30.0]))
def test_unfiltered_draws_skip_only_tokens_that_cannot_win(seed: int, spread: float) -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(seed % 1000)) * spread
    row = Row(seed=seed)
    assert draw(logits, [row], filtered=False) == [expected(logits[0].tolist(), row)]


def test_equal_logits_are_kept_and_drawn_by_id() -> None:
    flat = torch.zeros(1, 40)
    for row in (Row(top_k=5), Row(top_p=0.26), Row(top_k=20, top_p=0.4), Row(min_p=1.0)):
        probabilities = kept(flat[0].tolist(), row)
        seen = {draw(flat, [Row(**{**vars(row), "position": position})])[0] for position in range(400)}
        assert seen == set(probabilities)
    assert kept(flat[0].tolist(), Row(top_k=5)).keys() == {0, 1, 2, 3, 4}


def test_top_p_sets_wider_than_the_first_candidates_are_complete() -> None:
    vocab = 3000
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(3)) * 0.2
    logits[1, 5] = 9.0
    rows = [Row(top_p=0.9, seed=4), Row(top_p=0.6, seed=4), Row(min_p=0.4, seed=9)]
    assert len(kept(logits[0].tolist(), rows[0])) > 2000
    assert len(kept(logits[1].tolist(), rows[1])) == 1
    assert draw(logits, rows) == [expected(logits[i].tolist(), row) for i, row in enumerate(rows)]


def test_the_frequencies_are_those_of_the_renormalised_distribution() -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(0)) * 2
    draws = 20_000
    for row in (Row(), Row(temperature=0.7, top_p=0.9), Row(temperature=1.5, top_k=12), Row(min_p=0.05)):
        rows = [Row(**{**vars(row), "seed": 77, "position": position}) for position in range(draws)]
        tokens = draw(logits.expand(draws, -1), rows, filtered=row != Row())
        probabilities = kept(logits.tolist(), row)
        counts = np.bincount(tokens, minlength=40)
        assert counts[[token for token in range(40) if token not in probabilities]].sum() == 0
        chi_square = sum((counts[t] - p * draws) ** 2 / (p * draws) for t, p in probabilities.items())
        freedom = len(probabilities) - 1
        assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


def test_a_row_draws_alone_what_it_draws_in_a_batch() -> None:
    logits = torch.randn(6, 700, generator=torch.Generator().manual_seed(1)) * 2
    rows = [
        Row(seed=1),
        Row(top_k=3, seed=2),
        Row(top_p=0.99, seed=3),
        Row(top_k=600, top_p=0.5, seed=4),
        Row(min_p=0.01, seed=5),
        Row(temperature=0.01, seed=6),
    ]
    assert draw(logits, rows) == [draw(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert draw(logits[:1], rows[:1], filtered=False) == draw(logits[:1], rows[:1], filtered=True)


def test_tokens_of_probability_zero_are_never_drawn() -> None:
    logits = torch.full((6, 30), -math.inf)
    logits[0, 3] = -5.0
    logits[2] = math.nan
    logits[3, [4, 9]] = 1.0
    logits[4:] = 1.0
    logits[4, 7], logits[5, 7] = math.inf, math.nan
    for filtered in (False, True):
        first, nobody, broken, either, *others = draw(logits, [Row()] * 6, filtered=filtered)
        assert (first, nobody, broken, *others) == (3, -1, -1, -1, -1)
        assert either in {4, 9}


def test_the_coldest_temperature_is_greedy_and_never_overflows() -> None:
    logits = torch.tensor([[1e4, -3e4, 1.0, 9.999e3]])
    for temperature in (1e-45, 1e-30, 1e-6):
        assert draw(logits, [Row(temperature=temperature, top_p=0.5)]) == [0]
        assert draw(logits, [Row(temperature=temperature)], filtered=False) == [0]


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0, -1.0], [-math.inf, -7.0, -7.0, -7.0]])
    assert argmax(logits).tolist() == [1, 1]


@pytest.mark.parametrize("width", [1, 3, 8, 100])
def test_candidates_are_ordered_by_logit_then_id(width: int) -> None:
    logits = torch.tensor([[0.0, -0.0, 3.5, -2.0, 3.5, -math.inf, 1e-40, -1e-40], [1.0] * 8])
    values, ids = top_candidates(logits, width)
    order = [sorted(range(8), key=lambda token: (-row[token], token))[:width] for row in logits.tolist()]
    assert ids.tolist() == order
    assert torch.equal(values, logits.gather(1, ids))
