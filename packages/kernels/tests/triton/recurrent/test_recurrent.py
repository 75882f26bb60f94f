"""Recurrent operations of Triton against those of torch, over decodes, draft tokens, prompts and their snapshots."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are compiled by triton")

from packages.kernels.tests.ops.test_recurrent import DRAFTED, LENGTHS, STATES, segments_of, selective_inputs
from tercet.kernels.ops import recurrent as reference
from tercet.kernels.ops.recurrent import DeltaInputs, ScanInputs, Segment, Segments, SelectiveInputs
from tercet.kernels.triton.recurrent.causal_conv import causal_conv
from tercet.kernels.triton.recurrent.delta_rule import gated_delta_rule
from tercet.kernels.triton.recurrent.scan import state_space_scan
from tercet.kernels.triton.recurrent.selective import selective_scan

STEPS = {
    "mixed": segments_of(LENGTHS, {1: (100, 6), 4: (64, 7)}),
    "drafted": DRAFTED,
    "few": segments_of({1: 3, 2: 16, 5: 17}, {5: (2, 7)}),
}
SIZES = pytest.mark.parametrize(("rows", "columns"), [(16, 24), (5, 3), (20, 64)])
every_step = pytest.mark.parametrize("step", STEPS)


def tokens_of(step: str) -> int:
    segments = STEPS[step]
    return max([len(segments.singles), *(segment.end for segment in segments.rest)])


@every_step
@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_convolution(step: str, taps: int, bias: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    x = torch.randn(tokens_of(step), 90, device=device)[:, 10:80]  # as the projections of a layer are split
    weight, given = torch.randn(70, taps, device=device), torch.randn(70, device=device) if bias else None
    states = torch.randn(STATES, 70, taps - 1, device=device)
    expected_states = states.clone()
    expected = reference.causal_conv(x, expected_states, weight, given, STEPS[step], silu=bias)
    found = causal_conv(x, states, weight, given, STEPS[step], silu=bias)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(states, expected_states)


@every_step
@SIZES
@pytest.mark.parametrize("by_channel", [False, True], ids=["by head", "by channel"])
def test_delta_rule(step: str, rows: int, columns: int, by_channel: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    tokens = tokens_of(step)
    mixed = torch.randn(tokens, 4 * rows + 6 * columns, device=device)
    q, k, v = torch.split(mixed, [2 * rows, 2 * rows, 6 * columns], 1)
    decay = -torch.rand((tokens, 6, rows) if by_channel else (tokens, 6), device=device)
    given = DeltaInputs(
        q.view(tokens, 2, rows), k.view(tokens, 2, rows), v.view(tokens, 6, columns), decay, torch.rand(6, tokens).T
    )
    states = torch.randn(STATES, 6, rows, columns, device=device)
    expected_states = states.clone()
    expected = reference.gated_delta_rule(given, expected_states, STEPS[step])
    torch.testing.assert_close(gated_delta_rule(given, states, STEPS[step]), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(states, expected_states, atol=1e-4, rtol=1e-4)


@every_step
@SIZES
def test_state_space_scan(step: str, rows: int, columns: int, device: torch.device) -> None:
    torch.manual_seed(0)
    tokens = tokens_of(step)
    c, b = (torch.randn(tokens, 2, columns, device=device) for _ in range(2))
    scan = ScanInputs(c, b, torch.randn(tokens, 6, rows, device=device), -torch.rand(tokens, 6, device=device))
    states = torch.randn(STATES, 6, rows, columns, device=device)
    expected_states = states.clone()
    expected = reference.state_space_scan(scan, expected_states, STEPS[step])
    torch.testing.assert_close(state_space_scan(scan, states, STEPS[step]), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(states, expected_states, atol=1e-4, rtol=1e-4)


@every_step
@pytest.mark.parametrize(("channels", "size"), [(70, 16), (5, 3)])
def test_selective_scan(step: str, channels: int, size: int, device: torch.device) -> None:
    given = SelectiveInputs(*(each.to(device) for each in selective_inputs(tokens_of(step), channels, size)))
    given = given._replace(b=torch.cat([given.b, given.c], 1)[:, :size])  # as the projections of a layer are split
    states = torch.randn(STATES, channels, size, device=device)
    expected_states = states.clone()
    expected = reference.selective_scan(given, expected_states, STEPS[step])
    torch.testing.assert_close(selective_scan(given, states, STEPS[step]), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(states, expected_states, atol=1e-4, rtol=1e-4)


def test_keys_that_repeat_are_solved_without_overflow(device: torch.device) -> None:
    """The system of a chunk has ones below its diagonal, of which powers would be as large as binomials."""
    key = torch.ones(130, 1, 16, device=device)
    given = DeltaInputs(key, key, torch.randn(130, 1, 16, device=device), torch.zeros(130, 1), torch.ones(130, 1))
    states = torch.zeros(2, 1, 16, 16, device=device)
    segments = segments_of({1: 130})
    expected = reference.gated_delta_rule(given, states.clone(), segments)
    torch.testing.assert_close(gated_delta_rule(given, states, segments), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("strong", [-2.0, -50.0])
def test_channels_that_decay_strongly_beside_others(strong: float, device: torch.device) -> None:
    """Factors of single tokens would overflow: their decays sum to far less than the logarithm of the least float32."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 130, 2, 16, device=device).unbind()
    decay = torch.where(torch.rand(130, 2, 16, device=device) < 0.5, strong, -0.001)
    decay[:, :, :4], decay[:, :, 4:8] = strong, 0.0
    given = DeltaInputs(q, k, v, decay, torch.rand(130, 2, device=device))
    states = torch.randn(3, 2, 16, 16, device=device)
    expected_states, segments = states.clone(), segments_of({1: 130}, {1: (70, 2)})
    expected = reference.gated_delta_rule(given, expected_states, segments)
    torch.testing.assert_close(gated_delta_rule(given, states, segments), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(states, expected_states, atol=1e-4, rtol=1e-4)


def test_strong_decay_gives_no_infinite_values(device: torch.device) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 64, 2, 16, device=device).unbind()
    decay = torch.full((64, 2), -50.0, device=device)
    states = torch.randn(2, 2, 16, 16, device=device)
    segments = segments_of({1: 64})
    assert gated_delta_rule(DeltaInputs(q, k, v, decay, decay.exp()), states, segments).isfinite().all()
    assert state_space_scan(ScanInputs(q, k, v, decay), states, segments).isfinite().all()
    assert states.isfinite().all()


def test_sequences_are_computed_by_the_kernels_for_their_lengths() -> None:
    drafted = [Segment(1 + number, 2 + number, 3) for number in range(20)]
    rest = [*drafted, Segment(21, 90, 1), Segment(90, 95, 1, 6), Segment(95, 111, 2)]
    schedule = Segments(torch.tensor([3]), rest).schedule
    assert schedule.all.tolist() == [[0, 2], [2, 3], [3, 24]], "sequences in the order of their states"
    assert (schedule.short.tolist(), schedule.long.tolist()) == ([[2, 3], [3, 24]], [[0, 2]])
    assert schedule.chunks.tolist() == [[21, 85, 21, 1], [85, 90, 21, 1], [90, 95, 21, 1]]


def test_other_states_are_refused(device: torch.device) -> None:
    given = torch.zeros(2, 1, 4, device=device)
    rates, segments = torch.zeros(2, 1, device=device), segments_of({0: 2})
    for states in (torch.zeros(2, 1, 4, 4).double(), torch.zeros(2, 1, 4, 8)[..., ::2]):
        with pytest.raises(ValueError, match="contiguous and in float32"):
            gated_delta_rule(DeltaInputs(given, given, given, rates, rates), states, segments)
        with pytest.raises(ValueError, match="contiguous and in float32"):
            state_space_scan(ScanInputs(given, given, given, rates), states, segments)
        with pytest.raises(ValueError, match="contiguous and in float32"):
            selective_scan(selective_inputs(2, 1, 4), states[:, 0], segments)
    with pytest.raises(ValueError, match="must be contiguous"):
        causal_conv(given[:, 0], torch.zeros(2, 4, 6)[..., ::2], torch.zeros(4, 4), None, segments)
    with pytest.raises(ValueError, match="two taps or more"):
        causal_conv(given[:, 0], torch.zeros(2, 4, 0), torch.zeros(4, 1), None, segments)
