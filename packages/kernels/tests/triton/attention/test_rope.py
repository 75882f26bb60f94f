import pytest
import torch

pytest.importorskip("triton", reason="these are Triton's kernels")

from tercet.kernels.ops.rmsnorm import rmsnorm
from tercet.kernels.ops.rope import apply_rope, rope_cache
from tercet.kernels.ops.store_kv import E4M3, store_kv
from tercet.kernels.triton.attention.rope import TILINGS, rope_store
from tercet.kernels.triton.launch import Tiling


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (7, 1, 80), (9, 3, 24), (40, 10, 8)])
def test_rotates_and_stores(
    tiling: Tiling, norms: bool, heads: int, kv_heads: int, head_dim: int, device: torch.device
) -> None:
    """Also where heads are no power of two, and where the last program of a token has fewer of them."""
    projection = torch.randn(5, heads + 2 * kv_heads, head_dim, device=device)
    q, k, v = torch.split(projection, [heads, kv_heads, kv_heads], 1)
    table = rope_cache(64, head_dim, 100.0).to(device)
    positions, slots = torch.tensor([3, 0, 63, 7, 8], device=device), torch.tensor([11, 2, 7, 0, 5], device=device)
    actual_k, actual_v, expected_k, expected_v = torch.randn(4, 3, 4, kv_heads, head_dim, device=device).unbind()
    expected_k, expected_v = actual_k.clone(), actual_v.clone()
    weights = (torch.randn(head_dim, device=device), torch.randn(head_dim, device=device)) if norms else None
    out = rope_store(q, k, v, positions, table, actual_k, actual_v, slots, norms=weights, eps=1e-6, tiling=tiling)
    if weights is not None:
        q, k = rmsnorm(q, weights[0], 1e-6), rmsnorm(k, weights[1], 1e-6)
    expected, k = apply_rope(q, k, positions, table)
    store_kv(k, v, expected_k, expected_v, slots)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual_k, expected_k, rtol=1e-5, atol=1e-5)
    assert torch.equal(actual_v, expected_v)


def test_norms_of_float32(device: torch.device) -> None:
    """Nothing is rounded before they multiply it. The reference rounds once more, before it rotates."""
    heads = torch.randn(50, 3, 32, device=device).half()
    table, weights = torch.ones(1, 32, device=device), (torch.randn(32, device=device), torch.randn(32, device=device))
    table[:, 16:] = 0  # turns nothing
    place, caches = torch.arange(50, device=device), torch.zeros(2, 50, 1, 1, 32, device=device).half()
    q, k, v = torch.split(heads, 1, 1)
    out = rope_store(q, k, v, place * 0, table, caches[0], caches[1], place, norms=weights, eps=1e-6)
    for actual, x, weight in ((out, q, weights[0]), (caches[0].flatten(1, 2), k, weights[1])):
        assert (actual == rmsnorm(x, weight, 1e-6)).float().mean() > 0.99
        assert (actual == rmsnorm(x, weight.half(), 1e-6)).float().mean() < 0.9


def test_a_table_of_part_of_a_head_is_refused(device: torch.device) -> None:
    q = torch.zeros(1, 1, 16, device=device)
    cache, zero = torch.zeros(1, 1, 1, 16, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="a table of 8"):
        rope_store(q, q, q, zero, rope_cache(4, 8, 10.0).to(device), cache, cache, zero)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_stores_8_bits_as_the_reference_does(dtype: torch.dtype, device: torch.device) -> None:
    projection = (torch.randn(5, 4 + 2 * 2, 16, device=device) * 30).to(dtype)
    projection[3, 5, 2] = torch.nan
    q, k, v = torch.split(projection, [4, 2, 2], 1)
    table = rope_cache(64, 16, 100.0).to(device)
    positions, slots = torch.tensor([3, 0, 63, 7, 8], device=device), torch.tensor([11, 2, 7, 0, 5], device=device)
    caches = torch.zeros(4, 3, 4, 2, 16, device=device, dtype=E4M3)
    rope_store(q, k, v, positions, table, caches[0], caches[1], slots, scales=(0.3, 0.03))
    _, k = apply_rope(q, k, positions, table)
    store_kv(k, v, caches[2], caches[3], slots, (0.3, 0.03))
    bits = caches.view(torch.uint8)
    assert torch.equal(bits[1], bits[3])  # values are copied
    actual, expected = caches[0].float().nan_to_num(nan=1e4), caches[2].float().nan_to_num(nan=1e4)
    assert (actual == expected).float().mean() > 0.97  # keys are rotated with another rounding
    torch.testing.assert_close(actual, expected, rtol=0.13, atol=0.002)
    assert (caches[1].float().abs() == 448).any()
