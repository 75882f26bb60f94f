"""Recurrent states of slots, and their snapshots, as plans name them."""

import pytest
import torch

from tercet.kernels.ops.recurrent import Segment
from tercet.scheduler.core.plan import Plan, Row, StateRestore, StateSnapshot
from tercet.scheduler.executor.state_pool import StatePool
from tercet.scheduler.models.config.recurrent_config import StateTensor

SLOTS, SNAPSHOTS = 3, 4


@pytest.fixture
def pool() -> StatePool:
    """Return a pool of two layers in which each state is filled with its number."""
    tensors = (StateTensor((2,), torch.float32), StateTensor((1, 3), torch.bfloat16))
    pool = StatePool({0: tensors, 2: tensors}, SLOTS, SNAPSHOTS, torch.device("cpu"))
    for layer in (0, 2):
        for tensor in pool.layer(layer):
            tensor[:] = torch.arange(SLOTS + SNAPSHOTS).view(-1, *[1] * (tensor.dim() - 1))
    return pool


def states(pool: StatePool) -> list[float]:
    """Return the content of each state, which is the same in all tensors."""
    values = [tensor.flatten(1).float() for layer in (0, 2) for tensor in pool.layer(layer)]
    assert all(torch.equal(value, value[:, :1].expand_as(value)) for value in values)
    assert all(torch.equal(value[:, 0], values[0][:, 0]) for value in values)
    return values[0][:, 0].tolist()


def test_a_row_from_the_start_begins_with_an_empty_state(pool: StatePool) -> None:
    pool.begin(Plan(step=0, rows=[Row(1, 0, 4, sample=False), Row(2, 3, 2, sample=False)]))
    assert states(pool)[:SLOTS] == [0, 0, 2]


def test_restores_come_before_snapshots_of_no_tokens(pool: StatePool) -> None:
    plan = Plan(
        step=0,
        rows=[Row(1, 9, 1, sample=True)],
        restores=[StateRestore(1, 2)],
        snapshots=[StateSnapshot(0, 0, 3)],
    )
    pool.begin(plan)
    assert states(pool) == [0, 5, 2, 3, 4, 5, 5]


def test_rows_are_cut_where_snapshots_are_taken(pool: StatePool) -> None:
    rows = [Row(0, 5, 1, sample=True), Row(2, 0, 6, sample=True), Row(1, 8, 1, sample=True)]
    taken = [StateSnapshot(1, 2, 0), StateSnapshot(1, 6, 1)]
    segments = pool.begin(Plan(step=0, rows=rows, snapshots=taken))
    assert segments.singles.tolist() == [0]
    assert segments.rest == [Segment(1, 3, 2, 3), Segment(3, 7, 2, 4), Segment(7, 8, 1)]


def test_draft_tokens_continue_the_sequences_of_decodes(pool: StatePool) -> None:
    rows = [Row(0, 5, 1, sample=True), Row(2, 7, 1, sample=True), Row(2, 8, 1, sample=True), Row(2, 9, 1, sample=True)]
    taken = [StateSnapshot(1, 1, 0), StateSnapshot(2, 1, 3)]
    segments = pool.begin(Plan(step=0, rows=rows, snapshots=taken, draft_tokens={2: 5, 3: 6}))
    assert segments.singles.tolist() == [0, 2]
    assert segments.taken == [(1, SLOTS)]
    assert segments.rest == [Segment(2, 3, 2, SLOTS + 3), Segment(3, 4, 2)]
    assert states(pool) == list(range(SLOTS + SNAPSHOTS)), "snapshots of tokens are taken by the layers"
    assert pool.bytes == 2 * (SLOTS + SNAPSHOTS) * (2 * 4 + 3 * 2)
