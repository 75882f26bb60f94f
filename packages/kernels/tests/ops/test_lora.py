"""Adapters of a linear layer, held against the definition: a merged weight for each token."""

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from tercet.kernels.ops.lora import (
    LoRARows,
    LoRAWeights,
    Segment,
    add_lora,
    grouped,
    longest_segment,
    most_segments,
)

INPUTS, RANK = 24, 4
PARTS = (8, 4, 4)


def weights_of(ranks: list[int], parts: tuple[int, ...], dtype: torch.dtype = torch.float32) -> LoRAWeights:
    generator = torch.Generator().manual_seed(1)
    a = torch.zeros(len(ranks), len(parts) * RANK, INPUTS)
    b = torch.zeros(len(ranks), RANK, sum(parts))
    for place, rank in enumerate(ranks):
        for part in range(len(parts)):
            a[place, part * RANK : part * RANK + rank] = torch.randn(rank, INPUTS, generator=generator)
        b[place, :rank] = torch.randn(rank, sum(parts), generator=generator)
    return LoRAWeights(a.to(dtype), b.to(dtype), parts)


def merged(weights: LoRAWeights, place: int) -> torch.Tensor:
    """What is added to the weight [outputs, inputs]."""
    rows, start = [], 0
    for part, size in enumerate(weights.parts):
        a = weights.a[place, part * RANK : (part + 1) * RANK].double()
        b = weights.b[place, :, start : start + size].double()
        rows.append(b.T @ a)
        start += size
    return torch.cat(rows)


def rows_of(runs: list[Segment], ranks: list[int]) -> LoRARows:
    return LoRARows(runs, torch.tensor(runs, dtype=torch.int32).view(-1, 3), ranks)


@pytest.mark.parametrize("parts", [(16,), PARTS])
@pytest.mark.parametrize(
    "runs",
    [
        [],
        [Segment(0, 0, 7)],
        [Segment(1, 2, 5)],
        [Segment(0, 0, 2), Segment(2, 2, 3), Segment(0, 5, 6), Segment(1, 6, 7)],
    ],
)
def test_every_token_has_its_own_adapter_added(parts: tuple[int, ...], runs: list[Segment]) -> None:
    ranks = [4, 1, 3]
    weights = weights_of(ranks, parts)
    x, out = torch.randn(7, INPUTS), torch.randn(7, sum(parts))
    expected = out.double()
    for place, start, stop in runs:
        for token in range(start, stop):
            expected[token] += merged(weights, place) @ x[token].double()
    add_lora(out, x, weights, rows_of(runs, ranks))
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@hypothesis.given(st.lists(st.integers(-1, 4), max_size=300))
def test_segments_of_sorted_tokens_have_each_token_with_an_adapter_once(slots: list[int]) -> None:
    table, order, longest = grouped(np.array(slots, dtype=np.int64))
    found = [(slot, token) for slot, start, stop in table.tolist() for token in order[start:stop].tolist()]
    assert sorted(found) == sorted((slot, token) for token, slot in enumerate(slots) if slot >= 0)
    assert all(0 < stop - start <= longest for _, start, stop in table.tolist())
    assert longest == longest_segment(len(slots))
    assert len(table) <= most_segments(len(slots), 5)


def test_the_rows_of_a_decode_with_one_adapter_are_few_segments() -> None:
    assert [most_segments(rows, 8) for rows in (1, 8, 32, 256)] == [1, 8, 10, 12]
    assert len(grouped(np.zeros(256, dtype=np.int64))[0]) == 4


def test_sums_are_rounded_once() -> None:
    weights = weights_of([4], (16,), torch.bfloat16)
    x, out = torch.randn(5, INPUTS).bfloat16(), torch.randn(5, 16).bfloat16()
    exact = out.double() + x.double() @ merged(weights, 0).T
    add_lora(out, x, weights, rows_of([Segment(0, 0, 5)], [4]))
    assert torch.equal(out, exact.float().bfloat16())


def test_rows_given_as_a_table_only_are_refused() -> None:
    weights, table = weights_of([4], (16,)), torch.tensor([[0, 0, 5]], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="only a kernel"):
        add_lora(torch.zeros(5, 16), torch.ones(5, INPUTS), weights, LoRARows(None, table, [4]))
