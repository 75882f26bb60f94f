import pytest
import torch

pytest.importorskip("triton", reason="these are Triton's kernels")

from tercet.kernels.ops.rmsnorm import rmsnorm
from tercet.kernels.ops.rope import apply_rope, rope_cache
from tercet.kernels.ops.store_kv import store_kv
from tercet.kernels.triton.rope import rope_store


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (7, 1, 80), (3, 3, 24)])
def test_rotates_and_stores(norms: bool, heads: int, kv_heads: int, head_dim: int, device: torch.device) -> None:
    projection = torch.randn(5, heads + 2 * kv_heads, head_dim, device=device)
    q, k, v = torch.split(projection, [heads, kv_heads, kv_heads], 1)
    table = rope_cache(64, head_dim, 100.0).to(device)
    positions, slots = torch.tensor([3, 0, 63, 7, 8], device=device), torch.tensor([11, 2, 7, 0, 5], device=device)
    actual_k, actual_v, expected_k, expected_v = torch.randn(4, 3, 4, kv_heads, head_dim, device=device).unbind()
    expected_k, expected_v = actual_k.clone(), actual_v.clone()
    weights = (torch.randn(head_dim, device=device), torch.randn(head_dim, device=device)) if norms else None
    out = rope_store(q, k, v, positions, table, actual_k, actual_v, slots, norms=weights, eps=1e-6)
    if weights is not None:
        q, k = rmsnorm(q, weights[0], 1e-6), rmsnorm(k, weights[1], 1e-6)
    expected, k = apply_rope(q, k, positions, table)
    store_kv(k, v, expected_k, expected_v, slots)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual_k, expected_k, rtol=1e-5, atol=1e-5)
    assert torch.equal(actual_v, expected_v)


def test_a_table_of_part_of_a_head_is_refused(device: torch.device) -> None:
    q = torch.zeros(1, 1, 16, device=device)
    cache, zero = torch.zeros(1, 1, 1, 16, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="a table of 8"):
        rope_store(q, q, q, zero, rope_cache(4, 8, 10.0).to(device), cache, cache, zero)
