from itertools import pairwise
from typing import Any

import pytest
import torch

from tercet.kernels.attention.api import AttentionParams, NewTokens
from tercet.kernels.attention.torch_native import TorchNativeAttention
from tercet.scheduler.executor.forward_batch import ForwardMode

MIXED = [(0, 1, 2), (1, 7, 12), (2, 4, 7), (3, 9, 9)]


@pytest.mark.parametrize(
    ("tokens", "rows", "query_lens", "kv_lens"),
    [
        (slice(0, 10), slice(0, 3), [1, 7, 2], [2, 12, 5]),
        (slice(10, 21), slice(2, 4), [2, 9], [7, 9]),
        (slice(1, 8), slice(1, 2), [7], [12]),
        (slice(3, 6), slice(1, 2), [3], [10]),  # of a row that is cut twice
        (slice(0, 1), slice(0, 1), [1], [2]),
        (slice(20, 21), slice(3, 4), [1], [9]),
    ],
)
def test_a_row_goes_on_where_it_was_cut(
    tokens: slice, rows: slice, query_lens: list[int], kv_lens: list[int], steps: Any
) -> None:
    batch = steps().step(MIXED)
    part = batch.part(tokens)
    [group], [whole] = part.attention, batch.attention
    assert (group.host_query_lens, group.host_kv_lens) == (query_lens, kv_lens)
    assert group.query_start.tolist() == [sum(query_lens[:row]) for row in range(len(query_lens) + 1)]
    assert group.kv_lens.tolist() == kv_lens
    assert part.mode is ForwardMode.of(query_lens)
    assert group.query_start.dtype == group.kv_lens.dtype == torch.int32
    for name in ("input_ids", "positions"):
        assert torch.equal(getattr(part, name), getattr(batch, name)[tokens])
    assert torch.equal(group.slot_mapping, whole.slot_mapping[tokens])
    assert torch.equal(group.page_table, whole.page_table[rows])


@pytest.mark.parametrize("cuts", [[0, 21], [0, 10, 21], [0, 3, 6, 7, 20, 21], [*range(22)]])
def test_parts_one_after_another_give_what_the_step_gives(cuts: list[int], attending: Any, steps: Any) -> None:
    """Also parts of parts, and one part twice: backends are planned for whichever was asked for last."""
    whole, cut = steps().step(MIXED), steps().step(MIXED)
    given = []
    for first, last in pairwise(cuts):
        part = cut.part(slice(0, last)).part(slice(first, last))
        for _ in range(2):
            hidden = attending(part.input_ids, part.positions, part)
        given.append(hidden)
    torch.testing.assert_close(torch.cat(given), attending(whole.input_ids, whole.positions, whole))


class Rotating(TorchNativeAttention):
    """A backend that rotates what is new, or says so."""

    def attend_new(self, q: torch.Tensor, _keys: Any, _values: Any, _new: Any, params: AttentionParams) -> torch.Tensor:
        return q * params.scale


@pytest.mark.parametrize(
    ("backend", "rows", "rotates"),
    [
        (Rotating, [(0, 1, 2), (1, 1, 1)], True),
        (Rotating, [(0, 1, 2), (1, 7, 12)], False),
        (Rotating, [(1, 7, 12)], False),
        (TorchNativeAttention, [(0, 1, 2)], False),
    ],
)
def test_only_in_a_step_of_decodes_may_a_backend_rotate(
    backend: type[TorchNativeAttention], rows: list[tuple[int, int, int]], rotates: bool, steps: Any
) -> None:
    batch = steps(backend).step(rows)
    assert batch.rotates(0) == rotates
    q = torch.ones(len(batch.input_ids), 2, 4)
    new = NewTokens(
        k=q, v=q, positions=batch.positions, table=torch.ones(20, 4), norms=None, eps=0.0, scales=(1.0, 1.0)
    )
    if rotates:
        assert torch.equal(batch.attend_new(0, q, new, AttentionParams(scale=3.0)), q * 3)
    else:
        with pytest.raises(RuntimeError, match="rotates"):
            batch.attend_new(0, q, new, AttentionParams(scale=3.0))
    assert batch.part(slice(0, 1)).rotates(0) == (backend is Rotating), "what is left may be a decode alone"
