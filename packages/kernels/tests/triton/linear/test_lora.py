"""Adapters against their reference, over runs of every kind and sizes that are no whole blocks."""

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="these are Triton's kernels")

from tercet.kernels.ops import lora as reference
from tercet.kernels.ops.lora import LoRARows, LoRAWeights, Segment
from tercet.kernels.ops.projection import Norm
from tercet.kernels.ops.quantized import quantize
from tercet.kernels.ops.rmsnorm import rmsnorm
from tercet.kernels.triton.linear import lora
from tercet.kernels.triton.linear.adapted_row import supports_adapted_row
from tercet.kernels.triton.linear.lora import add_lora
from tercet.kernels.triton.linear.projection import project_adapted

INPUTS, TOKENS = 72, 90
PARTS = [(70,), (130, 20, 33), (48, 48)]
SHORT = [Segment(0, 0, 16), Segment(2, 16, 17), Segment(0, 19, 21), Segment(1, 30, 40)]
MIXED = [Segment(0, 0, 16), Segment(2, 16, 17), Segment(0, 19, 83), Segment(1, 84, 90)]


def weights_of(
    ranks: list[int],
    rank: int,
    parts: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    inputs: int = INPUTS,
) -> LoRAWeights:
    """Of an adapter at each place, zero beyond its own rank."""
    a = torch.randn(len(ranks), len(parts), rank, inputs, device=device) / inputs**0.5
    b = torch.randn(len(ranks), rank, sum(parts), device=device) / rank**0.5
    for place, own in enumerate(ranks):
        a[place, :, own:], b[place, own:] = 0.0, 0.0
    return LoRAWeights(a.flatten(1, 2).to(dtype), b.to(dtype), parts)


def rows_of(runs: list[Segment], ranks: list[int], device: torch.device) -> LoRARows:
    table = torch.tensor(runs, dtype=torch.int32, device=device).view(-1, 3)
    return LoRARows(runs, table, ranks, max((run.stop - run.start for run in runs), default=0))


def assert_as_the_reference(
    x: torch.Tensor, weights: LoRAWeights, rows: LoRARows, tolerance: float = 2e-6
) -> torch.Tensor:
    before = torch.linspace(-2, 2, len(x) * sum(weights.parts), device=x.device).view(len(x), -1).to(x.dtype)
    actual, expected = before.clone(), before.clone()
    add_lora(actual, x, weights, rows)
    reference.add_lora(expected, x, weights, rows)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    others = torch.ones(len(x), dtype=torch.bool)
    for run in rows.known:
        others[run.start : run.stop] = False
    assert torch.equal(actual[others], before[others])
    return actual


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("rank", [4, 16, 64])
@pytest.mark.parametrize(
    ("ranks", "runs"),
    [
        ([1.0], [Segment(0, 3, 4)]),
        ([1.0], [Segment(0, 0, 16), Segment(0, 16, 23)]),
        ([1.0, 0.25, 0.5], SHORT),
        ([1.0, 0.25, 0.5], MIXED),
    ],
)
def test_every_token_has_its_own_adapter_added(
    parts: tuple[int, ...], rank: int, ranks: list[float], runs: list[Segment], device: torch.device
) -> None:
    own = [int(rank * share) for share in ranks]
    weights = weights_of(own, rank, parts, device)
    assert_as_the_reference(torch.randn(TOKENS, INPUTS, device=device), weights, rows_of(runs, own, device))


@pytest.mark.parametrize("rank", [1, 20, 200])
def test_ranks_that_are_no_whole_blocks(rank: int, device: torch.device) -> None:
    own = [rank] * 3
    weights = weights_of(own, rank, (130, 20, 33), device)
    assert_as_the_reference(torch.randn(TOKENS, INPUTS, device=device), weights, rows_of(MIXED, own, device))


@pytest.mark.parametrize("longest", [1, 16, 17, 64])
def test_segments_may_be_shorter_than_longest(longest: int, device: torch.device) -> None:
    own, runs = [16] * 3, [Segment(0, 3, 4), Segment(2, 4, 5)]
    weights, rows = weights_of(own, 16, (130, 20, 33), device), rows_of(runs, own, device)
    x = torch.randn(TOKENS, INPUTS, device=device)
    assert_as_the_reference(x, weights, replace(rows, longest=longest))


@pytest.mark.parametrize("count", [1, 10, 40])
def test_inputs_in_splits(count: int, device: torch.device) -> None:
    own = [16] * 3
    weights, x = weights_of(own, 16, (40, 40), device, inputs=1800), torch.randn(TOKENS, 1800, device=device)
    runs = [Segment(token % 3, token, token + 1) for token in range(count)]
    rows = rows_of(runs, own, device)
    first = assert_as_the_reference(x, weights, rows, 1e-5)
    if count == 10:
        assert torch.equal(first, assert_as_the_reference(x, weights, rows, 1e-5))


@pytest.mark.parametrize("runs", [SHORT, MIXED])
@pytest.mark.parametrize(
    ("dtype", "held"),
    [
        (torch.float16, torch.float16),
        (torch.float32, torch.float16),
        (torch.float32, torch.bfloat16),
    ],
)
def test_other_types(dtype: torch.dtype, held: torch.dtype, runs: list[Segment], device: torch.device) -> None:
    weights = weights_of([16] * 3, 16, (130, 20, 33), device, held, 600)
    x = torch.randn(TOKENS, 600, device=device).to(dtype)
    tolerance = 2e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    actual = assert_as_the_reference(x, weights, rows_of(runs, [16] * 3, device), tolerance)
    assert actual.dtype == dtype


def test_sums_are_rounded_once(device: torch.device) -> None:
    """Of integers that float32 holds: 2701 and 10804, which float16 would round down, and 10805, which it rounds up."""
    a, b = torch.full((1, 4, INPUTS), 37.0, device=device), torch.ones(1, 4, 20, device=device)
    x, out = torch.ones(3, INPUTS, device=device).half(), torch.ones(3, 20, device=device).half()
    x[:, 5] = 2.0
    add_lora(out, x, LoRAWeights(a.half(), b.half(), (20,)), rows_of([Segment(0, 0, 3)], [4], device))
    assert (out == 10808).all()


@pytest.mark.parametrize("empty", [(0, 0, 0), (2, 7, 7), (1 << 30, TOKENS, TOKENS)])
def test_an_empty_segment_changes_nothing(empty: tuple[int, int, int], device: torch.device) -> None:
    """Nor reads anything, wherever its place would be: a step's table may be longer than its runs."""
    own = [16] * 3
    weights, rows = weights_of(own, 16, (130, 20, 33), device), rows_of(MIXED, own, device)
    padding = torch.tensor([empty] * 2, dtype=torch.int32, device=device)
    padded = replace(rows, table=torch.cat([padding, rows.table, padding]))
    assert_as_the_reference(torch.randn(TOKENS, INPUTS, device=device), weights, padded)


@pytest.mark.parametrize("count", [2, 40, 63, 64, 90])
def test_tokens_sorted_by_adapter(count: int, device: torch.device) -> None:
    """Every adapter is read once for the tokens of a segment, wherever they are; a graph's table has empty ends."""
    own, slots = [16, 4, 16], torch.arange(count).mul(7).remainder(5).sub(2).clamp(min=-1).numpy()
    table, order, longest = reference.grouped(slots)
    padding = reference.most_segments(count, len(own)) - len(table)
    assert padding >= 0
    runs = [Segment(slot, token, token + 1) for token, slot in enumerate(slots.tolist()) if slot >= 0]
    placed = torch.from_numpy(np.concatenate([table, np.zeros((padding, 3), dtype=np.int32)])).to(device)
    rows = LoRARows(runs, placed, own, longest, torch.from_numpy(order).to(device))
    weights = weights_of(own, 16, (130, 20, 33), device)
    assert_as_the_reference(torch.randn(TOKENS, INPUTS, device=device), weights, rows)


@pytest.mark.parametrize("segment", [Segment(1, 0, 1), Segment(1 << 30, 0, 0)])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("size", [256, 768, 4096])
def test_a_row_with_its_adapter_is_one_gemv(size: int, normed: bool, segment: Segment, device: torch.device) -> None:
    """Of every part beside the layer, and of a row without an adapter."""
    parts, own = (130, 20, 33), [16, 4]
    adapters = weights_of(own, 16, parts, device, torch.float16, size)
    weight = torch.randn(sum(parts), size, device=device).div(size**0.5).half()
    x, bias, residual = (torch.randn(1, width, device=device).half() for width in (size, sum(parts), sum(parts)))
    rows, norm = rows_of([segment], own, device), Norm(torch.rand(size, device=device).half(), 1e-5)
    given = norm if normed else None
    assert supports_adapted_row(x, weight, adapters, rows)
    out = project_adapted(x, weight, bias[0], adapters, rows, norm=given, residual=residual)
    source = rmsnorm(x.float(), norm.weight.float(), norm.eps) if normed else x.float()
    expected = torch.nn.functional.linear(source, weight.float(), bias[0].float()) + residual.float()
    if segment.stop:
        reference.add_lora(expected, source, adapters, rows)
    assert out is not None
    torch.testing.assert_close(out.float(), expected, rtol=2e-3, atol=6e-3)


def test_other_rows_have_no_gemv_with_adapters(device: torch.device) -> None:
    adapters = weights_of([4, 4], 4, (40,), device, torch.float16, 512)
    weight, x = torch.zeros(40, 512, device=device).half(), torch.zeros(2, 512, device=device).half()
    one = rows_of([Segment(0, 0, 1)], [4, 4], device)
    assert supports_adapted_row(x[:1], weight, adapters, one)
    assert project_adapted(x, weight, None, adapters, one) is None
    assert not supports_adapted_row(x[:1], weight, adapters, rows_of([Segment(0, 0, 1)] * 2, [4, 4], device))
    wide = weights_of([4, 4], 4, (40,), device, torch.float32, 512)
    assert not supports_adapted_row(x[:1], weight, wide, one)
    assert project_adapted(x[:1], quantize(weight.float(), "int8", (1, 512)), None, adapters, one) is None


def test_no_segments_launch_nothing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "lora_shrink_kernel", None)
    weights = weights_of([4], 4, (20,), device)
    assert_as_the_reference(torch.randn(TOKENS, INPUTS, device=device), weights, rows_of([], [4], device))


def test_rows_may_lie_apart(device: torch.device) -> None:
    """Of inputs and outputs that are part of a wider tensor, nothing beside them is read or written."""
    own = [16] * 3
    weights, rows = weights_of(own, 16, (130, 20, 33), device), rows_of(MIXED, own, device)
    wide = torch.full((TOKENS, INPUTS + 9), torch.nan, device=device)
    x = wide[:, 5 : 5 + INPUTS].normal_()
    around = torch.randn(TOKENS, 183 + 20, device=device)
    before, out = around.clone(), around[:, 11 : 11 + 183]
    expected = out.clone()
    reference.add_lora(expected, x, weights, rows)
    add_lora(out, x, weights, rows)
    torch.testing.assert_close(out, expected, rtol=2e-6, atol=2e-6)
    assert torch.equal(around[:, :11], before[:, :11])
    assert torch.equal(around[:, 194:], before[:, 194:])


def test_a_token_does_not_affect_others(device: torch.device) -> None:
    """Of a rank that is no whole block, so that what lies behind a token's is the next one's."""
    own = [20] * 3
    weights, rows = weights_of(own, 20, (130, 20, 33), device), rows_of(MIXED, own, device)
    x, out = torch.randn(TOKENS, INPUTS, device=device), torch.zeros(TOKENS, 183, device=device)
    x[2], x[17], x[83] = torch.nan, torch.nan, torch.nan
    add_lora(out, x, weights, rows)
    assert out.isnan().any(1).nonzero().flatten().tolist() == [2]


def test_host_ranks_are_not_needed(device: torch.device) -> None:
    own = [16, 4, 8]
    weights, rows = weights_of(own, 16, (130, 20, 33), device), rows_of(MIXED, own, device)
    x, outs = torch.randn(TOKENS, INPUTS, device=device), torch.zeros(2, TOKENS, 183, device=device)
    add_lora(outs[0], x, weights, rows)
    add_lora(outs[1], x, weights, replace(rows, runs=(), ranks=()))
    assert outs[0].any()
    assert torch.equal(*outs)


def test_non_contiguous_tensors_are_refused(device: torch.device) -> None:
    weights, rows = weights_of([4], 4, (20,), device), rows_of([Segment(0, 0, 1)], [4], device)
    x, out = torch.randn(1, 2 * INPUTS, device=device), torch.zeros(1, 20, device=device)
    turned = replace(weights, b=weights.b.transpose(1, 2).contiguous().transpose(1, 2))
    for given in ((out, x[:, ::2], weights), (out, x[:, :INPUTS], turned), (out.expand(20, 20).T, x, weights)):
        with pytest.raises(ValueError, match="contiguous"):
            add_lora(*given, rows)
