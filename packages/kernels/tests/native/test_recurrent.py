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
from tercet.kernels.native.recurrent import NativeRecurrence
from tercet.kernels.ops.recurrent import (
    DeltaInputs,
    ScanInputs,
    Segment,
    Segments,
    gated_delta_rule,
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
