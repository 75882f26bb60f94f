"""What is Triton's own in latent attention: splits, blocks of heads and tiles; see also attention/test_latent.py."""

import pytest
import torch

pytest.importorskip("triton", reason="these are Triton's kernels")

from packages.kernels.tests.triton.wide_tables import with_wide_table
from tercet.kernels.attention import triton_latent as backend
from tercet.kernels.attention import triton_plan
from tercet.kernels.attention.api import AttentionParams
from tercet.kernels.attention.latent import latent_caches
from tercet.kernels.attention.reference import ReferenceLatent
from tercet.kernels.ops.store_kv import E4M3
from tercet.kernels.tools.check import make_batch
from tercet.kernels.triton.launch import Tiling
from tercet.kernels.triton.linear import fp8

PARAMS = AttentionParams(scale=0.15)

Rows = list[tuple[int, int]]


def check(device: torch.device, rows: Rows, heads: int = 4, rank: int = 32, rope: int = 16, width: int = 0) -> None:
    """`width` is that of the page table, if it is wider than it has to be."""
    batch = make_batch(rows, 16, device)
    cache = torch.randn(int(batch.page_table.max()) + 1, 16, rank + rope, device=device)
    if width:
        batch = with_wide_table(batch, width)
    q = torch.randn(sum(batch.host_query_lens), heads, rank + rope, device=device)
    outputs = []
    for attention in (backend.TritonLatent(), ReferenceLatent()):
        attention.plan(batch)
        outputs.append(attention.attend(q, *latent_caches(cache, rank), PARAMS).cpu())
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-6, atol=4e-6)


@pytest.mark.parametrize("processors", [1, 4, 64])
@pytest.mark.parametrize("heads", [4, 20])
def test_splits_merge_without_a_seam(
    processors: int, heads: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_plan, "multiprocessors", lambda _: processors)
    monkeypatch.setattr(triton_plan, "_SPLIT", 64)
    check(device, [(1, 520), (1, 3), (1, 64), (1, 257)], heads=heads)


@pytest.mark.usefixtures("nan_in_unwritten_memory")
@pytest.mark.parametrize("processors", [1, 64], ids=["merged by the last", "merged by a kernel"])
def test_splits_that_a_row_has_no_keys_for_leave_nothing_behind(
    processors: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_plan, "multiprocessors", lambda _: processors)
    monkeypatch.setattr(triton_plan, "_LONG", 128)
    check(device, [(1, 300), (1, 7), (1, 128), (1, 129), (1, 500), (1, 1)], heads=20, width=512)


def test_counters_are_left_as_they_were(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph is replayed: what a step leaves is what the next one finds."""
    monkeypatch.setattr(triton_plan, "multiprocessors", lambda _: 4)
    attention, batch = backend.TritonLatent(), make_batch([(1, 300), (1, 5)], 16, device)
    attention.plan(batch)
    q, cache = torch.randn(2, 20, 48, device=device), torch.randn(20, 16, 48, device=device)
    first = attention.attend(q, *latent_caches(cache, 32), PARAMS)
    assert attention._plan.finished is not None
    assert not attention._plan.finished.any()
    assert torch.equal(attention.attend(q, *latent_caches(cache, 32), PARAMS), first)


def test_a_decode_reads_lengths_and_pages_on_the_device(device: torch.device) -> None:
    """A graph keeps its tensors, and is told of longer rows by what they hold."""
    batch = make_batch([(1, 300), (1, 300)], 16, device)
    q, cache = torch.randn(2, 4, 48, device=device), torch.randn(40, 16, 48, device=device)
    attention = backend.TritonLatent()
    attention.plan(batch)
    batch.kv_lens.copy_(torch.tensor([17, 250]))
    batch.page_table.copy_(batch.page_table.flip(0))
    given = attention.attend(q, *latent_caches(cache, 32), PARAMS)
    later = make_batch([(1, 17), (1, 250)], 16, device)
    later.page_table.copy_(batch.page_table[:, : later.page_table.shape[1]])
    reference = ReferenceLatent()
    reference.plan(later)
    wanted = reference.attend(q, *latent_caches(cache, 32), PARAMS)
    torch.testing.assert_close(given.cpu(), wanted.cpu(), rtol=1e-6, atol=4e-6)


@pytest.mark.parametrize(("heads", "each"), [(1, 1), (16, 16), (17, 9), (20, 10), (40, 14), (128, 16)])
def test_heads_are_shared_out_evenly(heads: int, each: int) -> None:
    assert backend._Blocks.of_decode(heads, 2, backend.DECODE_TILINGS[0]).heads == each
    assert backend._Blocks.of_extend(1, heads, 4, backend.EXTEND_TILINGS[0]).heads == each


@pytest.mark.parametrize("heads", [3, 16, 33])
def test_tiles_of_several_tokens_and_of_some_heads(heads: int, device: torch.device) -> None:
    check(device, [(1, 40), (33, 70), (5, 5), (1, 9)], heads=heads)


@pytest.mark.parametrize("decodes", backend.DECODE_TILINGS, ids=str)
@pytest.mark.parametrize("extends", backend.EXTEND_TILINGS, ids=str)
def test_every_tiling_equals_the_reference(decodes: Tiling, extends: Tiling, device: torch.device) -> None:
    batch = make_batch([(1, 200), (1, 3), (33, 70)], 16, device)
    q, cache = torch.randn(35, 6, 48, device=device).half(), torch.randn(20, 16, 48, device=device).half()
    attention, reference = backend.TritonLatent(decodes, extends), ReferenceLatent()
    attention.plan(batch)
    reference.plan(batch)
    actual, expected = (each.attend(q, *latent_caches(cache, 32), PARAMS).cpu() for each in (attention, reference))
    torch.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("widens", [False, True])
def test_8_bits_with_and_without_the_instruction(
    widens: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8, "_widens", lambda _: widens)
    batch = make_batch([(1, 70), (1, 3), (9, 40)], 16, device)
    cache = (torch.randn(int(batch.page_table.max()) + 1, 16, 48, device=device) * 3).to(E4M3)
    q = torch.randn(11, 4, 48, device=device)
    outputs = []
    for given in (cache, cache.float()):
        attention = backend.TritonLatent()
        attention.plan(batch)
        outputs.append(attention.attend(q, *latent_caches(given, 32), PARAMS))
    assert torch.equal(outputs[0], outputs[1])


def test_wrong_shapes_are_refused(device: torch.device) -> None:
    attention = backend.TritonLatent()
    attention.plan(make_batch([(1, 3)], 16, device))
    q, cache = torch.zeros(1, 2, 48, device=device), torch.zeros(1, 16, 48, device=device)
    for queries, vectors, rank in [
        (q.new_zeros(1, 2, 96)[..., ::2], cache, 32),
        (q, cache.transpose(1, 2), 32),
        (q[..., :47], cache, 32),
        (q, cache[:, :8].contiguous(), 32),
        (q, cache, 48),
        (q, cache, 0),
    ]:
        with pytest.raises(ValueError, match=r"contiguous|do not fit"):
            attention.attend(queries, *latent_caches(vectors, rank), AttentionParams(scale=1.0))
