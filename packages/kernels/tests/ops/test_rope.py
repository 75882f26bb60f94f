"""Rotary embedding against its definition. Equality with transformers is tested in the scheduler, which has it."""

import math
from dataclasses import replace

import pytest
import torch

from tercet.kernels.ops.rope import RopeScaling, apply_rope, inverse_frequencies, rope_cache

LLAMA3 = RopeScaling(
    type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
YARN = RopeScaling(type="yarn", factor=4.0, original_max_position_embeddings=32)


def test_rotates_pairs_of_halves_by_position_times_frequency() -> None:
    positions = torch.tensor([0, 3, 11])
    q, k = torch.randn(3, 2, 8), torch.randn(3, 1, 8)
    cache = rope_cache(12, 8, 100.0)
    for x, rotated in zip((q, k), apply_rope(q, k, positions, cache), strict=True):
        for token, position in enumerate(positions.tolist()):
            for pair in range(4):
                turn = torch.polar(torch.ones(()), torch.tensor(position * 100.0 ** (-2 * pair / 8)))
                expected = torch.complex(x[token, :, pair], x[token, :, pair + 4]) * turn
                actual = torch.complex(rotated[token, :, pair], rotated[token, :, pair + 4])
                torch.testing.assert_close(actual, expected)


def test_only_the_rotary_part_of_a_head_turns() -> None:
    q, k = torch.randn(2, 2, 10), torch.randn(2, 1, 10)
    cache = rope_cache(4, 6, 100.0)
    turned = apply_rope(q, k, torch.tensor([1, 3]), cache)
    narrow = apply_rope(q[..., :6], k[..., :6], torch.tensor([1, 3]), cache)
    for x, whole, part in zip((q, k), turned, narrow, strict=True):
        assert torch.equal(whole[..., 6:], x[..., 6:])
        assert torch.equal(whole[..., :6], part)


def test_scores_depend_on_distance_alone() -> None:
    cache = rope_cache(64, 16, 10_000.0)
    q, k = torch.randn(1, 1, 16), torch.randn(1, 1, 16)

    def score(at: int, other: int) -> float:
        turned_q, _ = apply_rope(q, k, torch.tensor([at]), cache)
        _, turned_k = apply_rope(q, k, torch.tensor([other]), cache)
        return float((turned_q * turned_k).sum())

    assert score(5, 2) == pytest.approx(score(50, 47), abs=1e-4)


def test_llama3_keeps_short_waves_and_stretches_long_ones() -> None:
    plain, _ = inverse_frequencies(32, 10_000.0)
    scaled, factor = inverse_frequencies(32, 10_000.0, LLAMA3)
    assert factor == 1.0
    for before, after in zip(plain.tolist(), scaled.tolist(), strict=True):
        wavelength = 2 * math.pi / before
        if wavelength < 64 / 4:
            assert after == before
        elif wavelength > 64:
            assert after == pytest.approx(before / 8)
        else:
            smooth = (64 / wavelength - 1) / 3
            assert after == pytest.approx((1 - smooth) * before / 8 + smooth * before, rel=1e-5)


def test_yarn_goes_from_extrapolation_to_interpolation() -> None:
    plain, _ = inverse_frequencies(32, 10_000.0)
    scaled, factor = inverse_frequencies(32, 10_000.0, YARN)
    ratio = (plain / scaled).tolist()
    assert ratio[0] == pytest.approx(1.0)
    assert ratio[-1] == pytest.approx(4.0)
    assert ratio == sorted(ratio)
    assert factor == pytest.approx(0.1 * math.log(4.0) + 1)
    assert float(rope_cache(1, 32, 10_000.0, YARN)[0, 0]) == pytest.approx(factor)


def test_linear_scaling_divides_and_dynamic_keeps_the_trained_length() -> None:
    plain, _ = inverse_frequencies(16, 500.0)
    linear, _ = inverse_frequencies(16, 500.0, RopeScaling(type="linear", factor=4.0))
    dynamic, _ = inverse_frequencies(16, 500.0, RopeScaling(type="dynamic", factor=4.0))
    assert torch.equal(linear, plain / 4)
    assert torch.equal(dynamic, plain)


def test_longrope_has_one_kind_of_factors_for_all_that_is_served() -> None:
    """Keys that are cached stay as they are, however long a text grows."""
    scaling = RopeScaling(
        type="longrope",
        factor=4.0,
        original_max_position_embeddings=16,
        short_factor=(1.0, 2.0),
        long_factor=(4.0, 8.0),
    )
    plain, _ = inverse_frequencies(4, 100.0)
    for length, factors in ((16, (1, 2)), (17, (4, 8)), (64, (4, 8))):
        frequencies, factor = inverse_frequencies(4, 100.0, scaling, length=length)
        torch.testing.assert_close(frequencies, plain / torch.tensor(factors))
        assert factor == pytest.approx(math.sqrt(1.5))  # log 4 is half of log 16
        assert torch.equal(rope_cache(length, 4, 100.0, scaling)[1, :2], (frequencies.cos() * factor))
    assert inverse_frequencies(4, 100.0, replace(scaling, attention_factor=1.3))[1] == 1.3
    assert inverse_frequencies(4, 100.0, replace(scaling, factor=1.0))[1] == 1.0


def test_an_unknown_type_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'bent' is not one of default, linear"):
        inverse_frequencies(16, 500.0, RopeScaling(type="bent"))
