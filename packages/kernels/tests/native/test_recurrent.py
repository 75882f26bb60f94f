"""Native recurrent operations against those of torch, in every instruction set and odd size."""

import pytest
import torch

from packages.kernels.tests.ops.test_recurrent import (
    DRAFTED,
    LENGTHS,
    STATES,
    owners,
    part_of,
    segments_of,
    selective_inputs,
)
from tercet.kernels.native.library import Library
from tercet.kernels.native.recurrent import NativeConvolution, NativeRecurrence
from tercet.kernels.ops.recurrent import (
    DeltaInputs,
    GateName,
    ScanInputs,
    Segment,
    Segments,
    causal_conv,
    gated_delta_rule,
    gated_rmsnorm,
    selective_scan,
    state_space_scan,
)

SIZES = pytest.mark.parametrize(("rows", "columns"), [(16, 24), (5, 3), (12, 64), (33, 81)])
CUTS = {1: (100, 6), 4: (64, 7)}


BY_CHANNEL = pytest.mark.parametrize("by_channel", [False, True], ids=["by head", "by channel"])


def delta_inputs(
    tokens: int, rows: int, columns: int, dtype: torch.dtype = torch.float32, *, by_channel: bool = False
) -> DeltaInputs:
    torch.manual_seed(0)
    q, k = (torch.randn(tokens, 2, rows, dtype=dtype) for _ in range(2))
    v, beta = torch.randn(tokens, 6, columns, dtype=dtype), torch.rand(tokens, 6).to(dtype)
    return DeltaInputs(q, k, v, -torch.rand(tokens, 6, rows) if by_channel else -torch.rand(tokens, 6), beta)


@SIZES
@BY_CHANNEL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_delta_rule(library: Library, rows: int, columns: int, dtype: torch.dtype, by_channel: bool) -> None:
    given = delta_inputs(len(owners(LENGTHS)), rows, columns, dtype, by_channel=by_channel)
    states = torch.randn(STATES, 6, rows, columns)
    copies = states.clone()
    segments = segments_of(LENGTHS, CUTS)
    expected = gated_delta_rule(given, states, segments)
    torch.testing.assert_close(
        NativeRecurrence(library).gated_delta_rule(given, copies, segments), expected, rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(copies, states, rtol=1e-4, atol=1e-4)


@SIZES
def test_state_space_scan(library: Library, rows: int, columns: int) -> None:
    tokens = len(owners(LENGTHS))
    torch.manual_seed(0)
    c, b = torch.randn(2, tokens, 3, columns)
    scan = ScanInputs(c, b, torch.randn(tokens, 6, rows), -torch.rand(tokens, 6))
    states = torch.randn(STATES, 6, rows, columns)
    copies = states.clone()
    segments = segments_of(LENGTHS, CUTS)
    expected = state_space_scan(scan, states, segments)
    torch.testing.assert_close(
        NativeRecurrence(library).state_space_scan(scan, copies, segments), expected, rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(copies, states, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("channels", "size"), [(128, 16), (88, 10), (5, 3), (96, 33)])
def test_selective_scan(library: Library, channels: int, size: int) -> None:
    given = selective_inputs(len(owners(LENGTHS)), channels, size)
    states = torch.randn(STATES, channels, size)
    copies = states.clone()
    segments = segments_of(LENGTHS, CUTS)
    expected = selective_scan(given, states, segments)
    torch.testing.assert_close(
        NativeRecurrence(library).selective_scan(given, copies, segments), expected, rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(copies, states, rtol=1e-4, atol=1e-4)


def test_delta_rule_of_views_of_one_projection(library: Library) -> None:
    tokens = len(owners(LENGTHS))
    torch.manual_seed(0)
    q, k, v = torch.randn(tokens, 2 * 16 + 2 * 16 + 6 * 24 + 9).split_with_sizes([32, 32, 153], 1)
    given = DeltaInputs(
        q.view(tokens, 2, 16), k.view(tokens, 2, 16), v[:, :144].view(tokens, 6, 24), -torch.rand(tokens, 6), v[:, :6]
    )
    states = torch.randn(STATES, 6, 16, 24)
    copies = states.clone()
    expected = NativeRecurrence(library).gated_delta_rule(
        DeltaInputs(*(each.contiguous() for each in given)), states, segments_of(LENGTHS)
    )
    assert torch.equal(NativeRecurrence(library).gated_delta_rule(given, copies, segments_of(LENGTHS)), expected)
    assert torch.equal(copies, states)


@pytest.mark.parametrize("act", ["silu", "sigmoid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_gated_norm(library: Library, act: GateName, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, gate = torch.randn(7, 3, 21), torch.randn(7, 70).to(dtype)[:, 5:68]
    for weight in (torch.randn(21), torch.randn(21).bfloat16()):
        found = NativeRecurrence(library).gated_rmsnorm(x, weight, gate, 1e-6, act)
        expected = gated_rmsnorm(x, weight.float(), gate.float(), 1e-6, act)
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected.to(dtype), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_convolution(library: Library, taps: int, dtype: torch.dtype, kept: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(len(owners(LENGTHS)), 320).to(dtype)[:, 10:310]  # as the projections of a layer are split
    weight, states = torch.randn(300, taps).to(dtype), torch.randn(STATES, 300, taps - 1).to(kept)
    segments = segments_of(LENGTHS, {1: (100, 6), 2: (1, 7)})
    for bias, silu in ((None, True), (torch.randn(300).to(dtype), False)):
        copies, wide = states.clone(), states.float()
        # inputs that are rounded to bfloat16, as one of the two dtypes is, are exact in float32
        rounded = x.to(kept).float()
        expected = causal_conv(
            rounded, wide, weight.float(), None if bias is None else bias.float(), segments, silu=silu
        )
        found = NativeConvolution(library, weight, bias)(x, copies, segments, silu=silu)
        assert found.dtype == dtype
        tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(found, expected.to(dtype), rtol=tolerance, atol=tolerance)
        assert torch.equal(copies, wide.to(kept))


def test_bits_of_a_convolution_depend_on_its_tokens_alone(library: Library) -> None:
    torch.manual_seed(0)
    x, states = torch.randn(90, 300), torch.randn(STATES, 300, 3).bfloat16()
    conv, copies = NativeConvolution(library, torch.randn(300, 4), None), states.clone()
    whole = conv(x, states, segments_of({1: 90}), silu=True)
    alone = [conv(x[:50], copies, segments_of({1: 50}), silu=True)]
    among = torch.cat([torch.randn(3, 300), x[50:51]])
    alone.append(conv(among, copies, segments_of(dict.fromkeys((0, 2, 3, 1), 1)), silu=True)[3:])
    alone.append(conv(torch.cat([x[51:], torch.randn(9, 300)]), copies, segments_of({1: 39, 4: 9}), silu=True)[:39])
    assert torch.equal(torch.cat(alone), whole)
    assert torch.equal(copies[1], states[1])


@BY_CHANNEL
def test_bits_do_not_depend_on_how_tokens_are_divided(library: Library, by_channel: bool) -> None:
    native, given = NativeRecurrence(library), delta_inputs(130, 16, 24, by_channel=by_channel)
    states = torch.randn(STATES, 6, 16, 24)
    copies = states.clone()
    expected = native.gated_delta_rule(given, states, segments_of({1: 130}))
    found = []
    for first, last in ((0, 1), (1, 60), (60, 61), (61, 130)):
        found.append(
            native.gated_delta_rule(part_of(given, slice(first, last)), copies, segments_of({1: last - first}))
        )
    assert torch.equal(torch.cat(found), expected)
    assert torch.equal(copies, states)


def test_draft_tokens_leave_snapshots(library: Library) -> None:
    given, states = delta_inputs(6, 16, 24), torch.randn(STATES, 6, 16, 24)
    copies = states.clone()
    expected = gated_delta_rule(given, states, DRAFTED)
    found = NativeRecurrence(library).gated_delta_rule(given, copies, DRAFTED)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(copies, states, rtol=1e-4, atol=1e-4)


def test_segments_of_one_state_run_in_order(library: Library) -> None:
    """Many short ones, which several threads would otherwise take at once."""
    native, given = NativeRecurrence(library), delta_inputs(256, 64, 64)
    states = torch.randn(STATES, 6, 64, 64)
    copies = states.clone()
    expected = native.gated_delta_rule(given, states, segments_of({1: 256}))
    cut = Segments(torch.empty(0, dtype=torch.int64), [Segment(first, first + 2, 1) for first in range(0, 256, 2)])
    assert torch.equal(native.gated_delta_rule(given, copies, cut), expected)
    assert torch.equal(copies, states)


def test_other_states_are_refused(library: Library) -> None:
    given, states = delta_inputs(2, 4, 4), torch.randn(STATES, 6, 4, 4)
    for wrong in (states.double(), states.transpose(2, 3)):
        with pytest.raises(ValueError, match="contiguous states in float32"):
            NativeRecurrence(library).gated_delta_rule(given, wrong, segments_of({1: 2}))
