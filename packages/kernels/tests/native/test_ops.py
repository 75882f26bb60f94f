"""Each native operation against the torch operation of the same name, in every instruction set and odd size."""

import pytest
import torch

from tercet.kernels.native.ops import NativeOps
from tercet.kernels.ops.activation import silu_and_mul
from tercet.kernels.ops.bitmask import apply_bitmask, pack_bitmask
from tercet.kernels.ops.philox import NoiseKey, gumbel
from tercet.kernels.ops.rmsnorm import add_rmsnorm, rmsnorm
from tercet.kernels.ops.rope import apply_rope, rope_cache
from tercet.kernels.ops.sampling import argmax_with_values, greedy

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
SHAPES = pytest.mark.parametrize("shape", [(1, 1), (1, 16), (3, 31), (2, 5, 64), (70, 576), (1, 4097), (0, 8)])


def assert_close(actual: torch.Tensor, exact: torch.Tensor) -> None:
    """Within 1e-5 of a float32 result, within one rounding of it in bfloat16."""
    bits = actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.float(), exact, rtol=2**-8 if bits else 1e-5, atol=1e-6)


@DTYPES
@SHAPES
def test_rmsnorm(native: NativeOps, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (torch.randn(shape) * 30).to(dtype)
    for weight in (torch.randn(shape[-1]), torch.randn(shape[-1]).bfloat16()):
        assert_close(native.rmsnorm(x, weight, 1e-5), rmsnorm(x.float(), weight.float(), 1e-5))


@DTYPES
@SHAPES
def test_add_rmsnorm(native: NativeOps, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    normed, total = native.add_rmsnorm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert_close(normed, add_rmsnorm(total.float(), torch.zeros(shape), weight.float(), 1e-6)[0])


@DTYPES
@SHAPES
def test_silu_and_mul(native: NativeOps, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (torch.randn(*shape[:-1], 2 * shape[-1]) * 20).to(dtype)
    assert_close(native.silu_and_mul(x), silu_and_mul(x.float()))


def test_silu_of_values_that_overflow_exp(native: NativeOps) -> None:
    gate = torch.tensor([-1e4, -100.0, -80.0, 0.0, 80.0, 100.0, 1e4, torch.nan, torch.inf])
    out = native.silu_and_mul(torch.cat([gate, torch.ones(9)])[None])[0]
    torch.testing.assert_close(out, torch.nn.functional.silu(gate), equal_nan=True, rtol=1e-5, atol=1e-6)


@DTYPES
@pytest.mark.parametrize(("heads", "head_dim", "rotary"), [(3, 64, 64), (1, 10, 10), (9, 128, 32), (5, 20, 18)])
def test_rope(native: NativeOps, heads: int, head_dim: int, rotary: int, dtype: torch.dtype) -> None:
    row = torch.randn(37, heads + 2, head_dim).to(dtype)  # queries and keys as parts of one row
    q, k = row[:, :heads], row[:, heads : heads + 1]
    positions, table = torch.randint(0, 500, (37,)), rope_cache(500, rotary, 1e4)
    for actual, exact in zip(
        native.apply_rope(q, k, positions, table), apply_rope(q.float(), k.float(), positions, table), strict=True
    ):
        assert_close(actual, exact)


def test_rope_refuses_positions_without_angles(native: NativeOps) -> None:
    x = torch.zeros(1, 1, 4)
    for position in (-1, 8):
        with pytest.raises(IndexError, match="a position"):
            native.apply_rope(x, x, torch.tensor([position]), rope_cache(8, 4, 1e4))


@pytest.mark.parametrize("vocab", [1, 15, 389, 1024, 5000])
def test_argmax_takes_the_first_of_equals_and_nan_above_all(native: NativeOps, vocab: int) -> None:
    logits = torch.randint(0, 20, (40, vocab)).float()
    logits[0] = -torch.inf
    logits[1, vocab // 2 :] = torch.nan
    logits[2, -1] = torch.inf
    (most, tokens), expected = native.argmax_with_values(logits), argmax_with_values(logits)
    assert torch.equal(tokens, expected[1])
    torch.testing.assert_close(most, expected[0], equal_nan=True, rtol=0, atol=0)
    assert torch.equal(native.greedy(logits), greedy(logits))


@pytest.mark.parametrize("vocab", [5, 32, 1000])
def test_apply_bitmask(native: NativeOps, vocab: int) -> None:
    logits, allowed = torch.randn(6, vocab), torch.rand(6, vocab) < 0.4
    mask = pack_bitmask(allowed)
    expected = apply_bitmask(logits, mask)
    native.apply_bitmask_(logits, mask)
    assert torch.equal(logits, expected)


def test_gumbel_noise_is_the_same_to_the_bit(native: NativeOps) -> None:
    key = NoiseKey(*torch.randint(0, 1 << 32, (4, 7)))
    rows, tokens = torch.randint(0, 7, (20_000,)), torch.randint(0, 200_000, (20_000,))
    assert torch.equal(native.gumbel(key, rows, tokens), gumbel(key, rows, tokens))


def test_wrong_tensors_are_refused(native: NativeOps) -> None:
    with pytest.raises(TypeError, match="float32 and bfloat16"):
        native.rmsnorm(torch.zeros(2, 4, dtype=torch.float16), torch.zeros(4, dtype=torch.float16), 1.0)
    with pytest.raises(TypeError, match=r"expected torch\.bfloat16"):
        native.add_rmsnorm(torch.zeros(2, 4).bfloat16(), torch.zeros(2, 4), torch.zeros(4), 1.0)
    with pytest.raises(ValueError, match="expected shape"):
        native.rmsnorm(torch.zeros(2, 4), torch.zeros(5), 1.0)
    with pytest.raises(ValueError, match="tensor on meta"):
        native.silu_and_mul(torch.zeros(2, 4, device="meta"))
    with pytest.raises(ValueError, match="does not cover"):
        native.apply_bitmask_(torch.zeros(1, 33), torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match="must be contiguous"):
        native.apply_bitmask_(torch.zeros(33, 2).T, torch.zeros(2, 2, dtype=torch.int32))
