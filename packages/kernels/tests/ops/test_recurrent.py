"""Recurrent operations over a state pool, against a loop over tokens."""

from collections.abc import Callable

import pytest
import torch

from tercet.kernels.ops.recurrent import (
    DeltaInputs,
    ScanInputs,
    Segment,
    Segments,
    SelectiveInputs,
    causal_conv,
    gated_delta_rule,
    selective_scan,
    state_space_scan,
)

LENGTHS = {3: 1, 0: 1, 5: 1, 1: 130, 4: 64, 2: 7}
"""Tokens of each state in a step."""
STATES = 8


DECAYS = pytest.mark.parametrize("factors", [(), (16,)], ids=["by head", "by channel"])


def segments_of(lengths: dict[int, int], cuts: dict[int, tuple[int, int]] | None = None) -> Segments:
    """Return a step; `cuts` are snapshots: (tokens, snapshot) by state."""
    singles = [state for state, count in lengths.items() if count == 1]
    rest, begin = [], len(singles)
    for state, count in lengths.items():
        if count == 1:
            continue
        tokens, snapshot = (cuts or {}).get(state, (0, -1))
        if 0 < tokens <= count:
            rest.append(Segment(begin, begin + tokens, state, snapshot))
        if tokens < count:
            rest.append(Segment(begin + tokens, begin + count, state))
        begin += count
    return Segments(torch.tensor(singles), rest)


def owners(lengths: dict[int, int]) -> list[int]:
    """Return the state of each token."""
    return [state for state, count in lengths.items() for _ in range(count)]


def conv_loop(x: torch.Tensor, states: torch.Tensor, weight: torch.Tensor, owner: list[int]) -> torch.Tensor:
    out = []
    for row, state in zip(x, owner, strict=True):
        known = torch.cat([states[state], row[:, None]], 1)
        states[state] = known[:, 1:]
        out.append((known * weight).sum(1))
    return torch.stack(out)


def delta_loop(given: DeltaInputs, states: torch.Tensor, owner: list[int]) -> torch.Tensor:
    """Apply the rule as its formula stands, token by token."""
    q, k, v, decay, beta = given
    out = []
    for place, state in enumerate(owner):
        for head in range(v.shape[1]):
            key_head = head * k.shape[1] // v.shape[1]
            key = k[place, key_head] / (k[place, key_head].square().sum() + 1e-6).sqrt()
            query = q[place, key_head] / (q[place, key_head].square().sum() + 1e-6).sqrt() / k.shape[2] ** 0.5
            old = states[state, head] * decay[place, head].exp().view(-1, 1)
            states[state, head] = old + torch.outer(key, beta[place, head] * (v[place, head] - key @ old))
            out.append(query @ states[state, head])
    return torch.stack(out).view_as(v)


def inputs(tokens: int, *factors: int) -> DeltaInputs:
    """Return inputs for 4 heads of 16 rows and 24 columns; `factors` is empty, or the number of rows."""
    torch.manual_seed(0)
    q, k, v = torch.randn(tokens, 2, 16), torch.randn(tokens, 2, 16), torch.randn(tokens, 4, 24)
    return DeltaInputs(q, k, v, -torch.rand(tokens, 4, *factors), torch.rand(tokens, 4))


def part_of(given: DeltaInputs, part: slice) -> DeltaInputs:
    return DeltaInputs(*(each[part] for each in given))


def test_convolution_equals_a_loop_over_tokens() -> None:
    owner = owners(LENGTHS)
    x, weight, bias = torch.randn(len(owner), 6), torch.randn(6, 4), torch.randn(6)
    states = torch.randn(STATES, 6, 3)
    expected_states = states.clone()
    expected = conv_loop(x, expected_states, weight, owner)
    assert torch.allclose(causal_conv(x, states, weight, bias, segments_of(LENGTHS)), expected + bias, atol=1e-5)
    assert torch.equal(states, expected_states)
    activated = causal_conv(x, expected_states.clone(), weight, bias, segments_of(LENGTHS), silu=True)
    again = causal_conv(x, expected_states, weight, bias, segments_of(LENGTHS))
    torch.testing.assert_close(activated, torch.nn.functional.silu(again))


def test_inputs_of_a_convolution_are_rounded_as_its_states_are() -> None:
    x, states = torch.randn(9, 6), torch.randn(STATES, 6, 3).bfloat16()
    copies, weight = states.clone(), torch.randn(6, 4).bfloat16()
    whole = causal_conv(x, states, weight, None, segments_of({1: 9}))
    parts = [causal_conv(part, copies, weight, None, segments_of({1: len(part)})) for part in (x[:5], x[5:])]
    assert whole.dtype == torch.float32
    torch.testing.assert_close(torch.cat(parts), whole)
    assert torch.equal(copies, states)


@DECAYS
def test_the_delta_rule_equals_a_loop_over_tokens(factors: tuple[int, ...]) -> None:
    owner = owners(LENGTHS)
    given = inputs(len(owner), *factors)
    states = torch.randn(STATES, 4, 16, 24)
    expected_states = states.clone()
    expected = delta_loop(given, expected_states, owner)
    assert torch.allclose(gated_delta_rule(given, states, segments_of(LENGTHS)), expected, atol=1e-4)
    assert torch.allclose(states, expected_states, atol=1e-4)


def test_the_state_space_scan_equals_a_loop_over_tokens() -> None:
    owner = owners(LENGTHS)
    torch.manual_seed(0)
    c, b = torch.randn(2, len(owner), 2, 24)
    x, decay = torch.randn(len(owner), 4, 16), -torch.rand(len(owner), 4)
    states = torch.randn(STATES, 4, 16, 24)
    expected_states, expected = states.clone(), torch.empty_like(x)
    for token, state in enumerate(owner):
        for head in range(4):
            added = torch.outer(x[token, head], b[token, head // 2])
            expected_states[state, head] = expected_states[state, head] * decay[token, head].exp() + added
            expected[token, head] = expected_states[state, head] @ c[token, head // 2]
    segments = segments_of(LENGTHS, {1: (100, 6), 2: (7, 7)})
    assert torch.allclose(state_space_scan(ScanInputs(c, b, x, decay), states, segments), expected, atol=1e-4)
    assert torch.allclose(states[:6], expected_states[:6], atol=1e-4)
    assert torch.equal(states[7], states[2])


def selective_inputs(tokens: int, channels: int, size: int) -> SelectiveInputs:
    torch.manual_seed(0)
    c, b = torch.randn(2, tokens, size)
    return SelectiveInputs(
        c, b, torch.randn(tokens, channels), torch.rand(tokens, channels), -torch.rand(channels, size)
    )


def test_the_selective_scan_equals_a_loop_over_tokens() -> None:
    owner = owners(LENGTHS)
    given = selective_inputs(len(owner), 12, 5)
    states = torch.randn(STATES, 12, 5)
    expected_states, expected = states.clone(), torch.empty_like(given.x)
    for token, state in enumerate(owner):
        for channel in range(12):
            step = given.step[token, channel]
            old = expected_states[state, channel] * (step * given.rates[channel]).exp()
            expected_states[state, channel] = old + step * given.x[token, channel] * given.b[token]
            expected[token, channel] = expected_states[state, channel] @ given.c[token]
    segments = segments_of(LENGTHS, {1: (100, 6), 2: (7, 7)})
    assert torch.allclose(selective_scan(given, states, segments), expected, atol=1e-4)
    assert torch.allclose(states[:6], expected_states[:6], atol=1e-4)
    assert torch.equal(states[7], states[2])


@DECAYS
def test_strong_decay_gives_no_infinite_values(factors: tuple[int, ...]) -> None:
    """The logarithms of what remains are differences of sums, which may be large in both directions."""
    given = inputs(64)._replace(decay=torch.full((64, 4, *factors), -50.0))
    states = torch.randn(STATES, 4, 16, 24)
    assert gated_delta_rule(given, states, segments_of({1: 64})).isfinite().all()
    assert states.isfinite().all()


@pytest.mark.parametrize("tokens", [2, 63, 64, 100, 130])
def test_a_snapshot_is_the_state_after_its_tokens(tokens: int) -> None:
    given = inputs(130)
    states = torch.randn(STATES, 4, 16, 24)
    shorter = states.clone()
    gated_delta_rule(part_of(given, slice(tokens)), shorter, segments_of({1: tokens}))
    gated_delta_rule(given, states, segments_of({1: 130}, {1: (tokens, 6)}))
    assert torch.allclose(states[6], shorter[1], atol=1e-4)


DRAFTED = Segments(torch.tensor([3, 1, 0]), [Segment(3, 4, 1, 6), Segment(4, 5, 1), Segment(5, 6, 0)], [(1, 7), (2, 5)])
"""Three sequences of one token; the second has two draft tokens, the third one. Snapshots after all but the last."""


def snapshots_of(advance: Callable[[Segments, slice, torch.Tensor], object], states: torch.Tensor) -> torch.Tensor:
    """Return the states after `DRAFTED`, from one sequence after the other."""
    for snapshot, state, tokens in ((7, 1, [1]), (6, 1, [3]), (-1, 1, [4]), (5, 0, [2]), (-1, 0, [5]), (-1, 3, [0])):
        for token in tokens:
            advance(Segments(torch.tensor([state]), []), slice(token, token + 1), states)
        if snapshot >= 0:
            states[snapshot] = states[state]
    return states


def test_each_draft_token_leaves_a_snapshot() -> None:
    given, states = inputs(6), torch.randn(STATES, 4, 16, 24)
    expected = snapshots_of(
        lambda segments, part, each: gated_delta_rule(part_of(given, part), each, segments), states.clone()
    )
    gated_delta_rule(given, states, DRAFTED)
    torch.testing.assert_close(states, expected, atol=1e-5, rtol=1e-5)
    x, weight, last = torch.randn(6, 6), torch.randn(6, 4), torch.randn(STATES, 6, 3)
    expected = snapshots_of(
        lambda segments, part, each: causal_conv(x[part], each, weight, None, segments), last.clone()
    )
    causal_conv(x, last, weight, None, DRAFTED)
    assert torch.equal(last, expected)


@DECAYS
def test_parts_of_a_step_give_what_the_whole_gives(factors: tuple[int, ...]) -> None:
    owner = owners(LENGTHS)
    given = inputs(len(owner), *factors)
    states = torch.randn(STATES, 4, 16, 24)
    copies = states.clone()
    segments = segments_of(LENGTHS, {4: (32, 7)})
    expected = gated_delta_rule(given, states, segments)
    parts = [slice(0, 2), slice(2, 50), slice(50, 150), slice(150, len(owner))]
    found = [gated_delta_rule(part_of(given, part), copies, segments.part(part)) for part in parts]
    assert torch.allclose(torch.cat(found), expected, atol=1e-4)
    assert torch.allclose(copies, states, atol=1e-4)
