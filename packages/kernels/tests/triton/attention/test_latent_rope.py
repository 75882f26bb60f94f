"""What is new in latent attention, normed, rotated and stored at once, against its references."""

import pytest
import torch

pytest.importorskip("triton", reason="these are Triton's kernels")

from tercet.kernels.ops.projection import Norm
from tercet.kernels.ops.rmsnorm import rmsnorm
from tercet.kernels.ops.rope import apply_rope, rope_cache
from tercet.kernels.triton.attention.latent_rope import latent_rope_store

TOKENS = 5


def given(
    heads: int, rank: int, rope: int, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(queries of which a part is rotated, that part, what is new), the last two as parts of something wider."""
    queries = torch.randn(TOKENS, heads, rank + 9 + rope, device=device).to(dtype)
    new = torch.randn(TOKENS, 7 + rank + rope, device=device).to(dtype)[:, 7:]
    return torch.full((TOKENS, heads, rank + rope), 3.0, device=device, dtype=dtype), queries[..., rank + 9 :], new


@pytest.mark.parametrize(("heads", "rank", "rope"), [(1, 32, 16), (3, 48, 8), (20, 40, 24), (128, 64, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_latents_are_normed_and_the_rest_is_rotated(
    heads: int, rank: int, rope: int, dtype: torch.dtype, device: torch.device
) -> None:
    q, turned, new = given(heads, rank, rope, device, dtype)
    norm, table = Norm(torch.randn(rank, device=device).to(dtype), 1e-3), rope_cache(64, rope, 100.0).to(device)
    positions, slots = torch.tensor([3, 0, 63, 7, 8], device=device), torch.tensor([11, 2, 7, 0, 5], device=device)
    cache = torch.full((3, 4, 1, rank + rope), 3.0, device=device, dtype=dtype)
    latent_rope_store(q, turned, new, norm, positions, table, cache, slots)
    rotated, key = apply_rope(turned, new[:, None, rank:], positions, table)
    expected = torch.cat([rmsnorm(new[:, :rank], *norm), key[:, 0]], 1)
    tolerance = 2e-6 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(cache.flatten(0, 2)[slots], expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(q[..., rank:], rotated, rtol=tolerance, atol=tolerance)
    assert (q[..., :rank] == 3).all(), "which a product writes"
    others = [slot for slot in range(12) if slot not in slots.tolist()]
    assert (cache.flatten(0, 2)[others] == 3).all()


def test_wrong_shapes_are_refused(device: torch.device) -> None:
    q, turned, new = given(2, 32, 16, device, torch.float32)
    norm, table = Norm(torch.ones(32, device=device), 1e-6), rope_cache(8, 16, 100.0).to(device)
    cache, index = torch.zeros(3, 4, 1, 48, device=device), torch.arange(TOKENS, device=device)
    for queries, part, stored, kept, angles in [
        (q, turned, new, cache, table[:, :8]),
        (q, turned.transpose(1, 2).contiguous().transpose(1, 2), new, cache, table),
        (q[:, :1], turned, new, cache, table),
        (q, turned, new[:, :40], cache, table),
        (q, turned, new, cache[..., :47], table),
        (q, turned, new.T.contiguous().T, cache, table),
        (q.transpose(0, 1).contiguous().transpose(0, 1), turned, new, cache, table),
        (q, turned, new, cache[:, ::2], table),
    ]:
        with pytest.raises(ValueError, match=r"heads of|queries"):
            latent_rope_store(queries, part, stored, norm, index, angles, kept, index)
