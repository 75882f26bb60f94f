"""What is Triton's own in attention: splits and tiles, and the large grid; see also attention/test_backends.py."""

import itertools
from dataclasses import replace
from functools import partial

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

pytest.importorskip("triton", reason="these are Triton's kernels")

from packages.kernels.tests.attention.freed_pages import poison_freed_pages
from packages.kernels.tests.triton.wide_tables import with_wide_table
from tercet.kernels.attention import triton as backend
from tercet.kernels.attention import triton_plan
from tercet.kernels.attention.api import AttentionParams
from tercet.kernels.attention.reference import ReferenceAttention
from tercet.kernels.attention.triton_plan import choose_splits, cut_tiles, list_splits
from tercet.kernels.device import default_device
from tercet.kernels.ops.store_kv import E4M3
from tercet.kernels.tools.check import make_batch
from tercet.kernels.triton.launch import Tiling
from tercet.kernels.triton.linear import fp8

DEVICE = default_device()
Rows = list[tuple[int, int]]


def check(
    rows: Rows,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    page_size: int = 16,
    window: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
    dtype: torch.dtype = torch.float32,
    width: int = 0,
    scale: float = 0.0,
) -> None:
    """`width` is that of the page table, if it is wider than it has to be; `scale` replaces the usual one."""
    torch.manual_seed(0)
    batch = make_batch(rows, page_size, DEVICE)
    pages = int(batch.page_table.max()) + 1
    k, v = torch.randn(2, pages, page_size, kv_heads, head_dim, device=DEVICE).to(dtype).unbind()
    poison_freed_pages(batch, window, k, v)
    wide = torch.randn(sum(batch.host_query_lens), heads + 3, head_dim, device=DEVICE).to(dtype)
    q = wide[:, 1 : heads + 1]  # a view into a fused projection
    given = torch.randn(heads, device=DEVICE) if sinks else None
    if width:
        batch = with_wide_table(batch, width)
    outputs = []
    for attention in (backend.TritonAttention(), ReferenceAttention()):
        attention.plan(batch)
        params = AttentionParams(scale=scale or head_dim**-0.5, window=window, softcap=softcap, sinks=given)
        outputs.append(attention.attend(q, k, v, params))
    step = torch.finfo(dtype).eps
    capped = 2 * softcap * torch.finfo(torch.float32).eps  # a capped score is a difference of numbers of that size
    atol = max(4e-6, 2 * step, capped, 4e-6 * scale)  # large scores are rounded in large steps
    torch.testing.assert_close(outputs[0].cpu(), outputs[1].cpu(), rtol=4 * step, atol=atol)


@pytest.mark.parametrize("processors", [1, 4, 64])
@pytest.mark.parametrize("window", [0, 300])
def test_splits_merge_without_a_seam(processors: int, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_plan, "multiprocessors", lambda _: processors)
    monkeypatch.setattr(triton_plan, "_SPLIT", 64)
    check([(1, 520), (1, 3), (1, 64), (1, 257)], head_dim=16, window=window, sinks=window > 0)


def test_splits_fill_the_machine_and_no_more() -> None:
    assert choose_splits(programs=8, longest=1 << 20, processors=132) == 64
    assert choose_splits(programs=64, longest=1 << 20, processors=132) == 8
    assert choose_splits(programs=1, longest=300, processors=132) == 8
    assert choose_splits(programs=1, longest=1, processors=132) == 1


def test_of_many_rows_a_list_says_how_they_are_split_if_any_may_be_long() -> None:
    assert choose_splits(programs=512, longest=2048, processors=132) == 1
    assert choose_splits(programs=512, longest=2049, processors=132) == 0


@hypothesis.given(st.lists(st.integers(1, 200_000), min_size=1, max_size=40), st.sampled_from([0, 100, 5000]))
def test_a_list_has_every_key_once_and_the_longest_rows_first(lengths: list[int], window: int) -> None:
    batch = make_batch([(1, 1)] * len(lengths), 4, torch.device("cpu"))
    split_list = list_splits(replace(batch, host_kv_lens=lengths), window)
    assert len(split_list) == len(lengths) + -(-len(lengths) // 2)
    used = [entry for entry in split_list.tolist() if entry[2]]
    assert all(not any(entry) for entry in split_list.tolist()[len(used) :])
    seen = [min(length, window or length) for length in lengths]
    [share] = {share for *_, share in used}
    assert share >= 2048
    assert share % 64 == 0
    for row, rows in itertools.groupby(used, key=lambda entry: entry[0]):
        splits = [split for _, split, _, _ in rows]
        assert splits == [*range(-(-seen[row] // share))]
        assert {of for at, _, of, _ in used if at == row} == {len(splits)}
    order = [seen[row] for row, _ in itertools.groupby(used, key=lambda entry: entry[0])]
    assert order == sorted(seen, reverse=True)


def test_a_long_row_is_split_and_those_beside_it_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_plan, "_LONG", 64)
    monkeypatch.setattr(triton_plan, "multiprocessors", lambda _: 4)
    check([(1, 300), (1, 7), (1, 64), (1, 65), (1, 129), (1, 1)], sinks=True)


@pytest.mark.usefixtures("nan_in_unwritten_memory")
@pytest.mark.parametrize("processors", [1, 64], ids=["merged by the last", "merged by a kernel"])
@pytest.mark.parametrize("window", [0, 200])
def test_splits_that_a_row_has_no_keys_for_leave_nothing_behind(
    processors: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A served page table is as wide as the longest row may become: most splits of most rows are empty then."""
    monkeypatch.setattr(triton_plan, "multiprocessors", lambda _: processors)
    monkeypatch.setattr(triton_plan, "_LONG", 128)
    made = []

    class Watched(backend.TritonAttention):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(backend, "TritonAttention", Watched)
    check([(1, 300), (1, 7), (1, 128), (1, 129), (1, 500), (1, 1)], width=512, window=window, sinks=True, head_dim=32)
    [watched] = made
    assert (watched._plan.finished is not None) == (processors == 1 or window > 0)
    assert watched._plan.finished is None or not watched._plan.finished.any()


def test_tiles_cover_every_new_token_once_and_the_longest_come_first() -> None:
    batch = make_batch([(1, 9), (5, 5), (9, 40), (1, 1)], 4, DEVICE)
    tiles = cut_tiles(batch, 4).tolist()
    assert sorted(map(tuple, tiles)) == [(1, 0), (1, 4), (2, 0), (2, 4), (2, 8), (3, 0)]
    assert tiles[:3] == [[2, 8], [2, 4], [2, 0]]


@pytest.mark.parametrize("extends", backend.EXTEND_TILINGS, ids=str)
def test_tilings_of_prompts(extends: Tiling, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts whose first keys all queries of a tile see, in whole blocks, and others of fewer than a block."""
    monkeypatch.setattr(backend, "TritonAttention", partial(backend.TritonAttention, extends=extends))
    check([(150, 300), (33, 33), (2, 130)])


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("window", [0, 70])
def test_large_scores(softcap: float, window: int) -> None:
    """The scale is multiplied into differences of scores: the largest of a row must be in the same base."""
    check([(1, 140), (70, 140)], head_dim=16, softcap=softcap, window=window, sinks=True, scale=6.0)


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_pages_and_heads(page_size: int, head_dim: int) -> None:
    check([(1, 70), (1, 1), (33, 100)], heads=7, kv_heads=1, head_dim=head_dim, page_size=page_size)


def test_half_precision() -> None:
    check([(1, 70), (20, 50)], head_dim=128, dtype=torch.float16, softcap=20.0)


@pytest.mark.parametrize("widens", [False, True])
def test_8_bits_with_and_without_the_instruction(widens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "_widens", lambda _: widens)
    batch = make_batch([(1, 70), (1, 3), (33, 100)], 16, DEVICE)
    k, v = (torch.randn(2, int(batch.page_table.max()) + 1, 16, 2, 64, device=DEVICE) * 3).to(E4M3).unbind()
    q = torch.randn(35, 4, 64, device=DEVICE)
    outputs = []
    for keys, values in ((k, v), (k.float(), v.float())):
        attention = backend.TritonAttention()
        attention.plan(batch)
        outputs.append(attention.attend(q, keys, values, AttentionParams(scale=0.1)))
    assert torch.equal(outputs[0], outputs[1])


def test_non_contiguous_inputs_are_refused() -> None:
    batch = make_batch([(1, 3)], 4, DEVICE)
    attention = backend.TritonAttention()
    attention.plan(batch)
    cache = torch.zeros(1, 4, 2, 16, device=DEVICE)
    with pytest.raises(ValueError, match="contiguous"):
        attention.attend(torch.zeros(1, 2, 32, device=DEVICE)[..., ::2], cache, cache, AttentionParams(scale=1.0))


GRID = list(
    itertools.product(
        [64, 96, 128, 192, 256],
        [1, 16, 64],
        [(8, 8), (8, 2), (6, 1)],
        [(0, 0.0, False), (33, 0.0, True), (0, 30.0, False)],
    )
)


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "page_size", "heads", "options"), GRID)
def test_the_grid(head_dim: int, page_size: int, heads: tuple[int, int], options: tuple[int, float, bool]) -> None:
    window, softcap, sinks = options
    check(
        [(1, 1), (1, 17), (1, 130), (1, 513), (1, 64), (16, 16), (70, 70), (5, 200), (1, 40)],
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=head_dim,
        page_size=page_size,
        window=window,
        softcap=softcap,
        sinks=sinks,
        dtype=torch.float32 if DEVICE.type == "cpu" else torch.bfloat16,
    )


@pytest.mark.parametrize(
    ("dim", "group", "cached", "wanted"),
    [
        (64, 4, torch.float32, (32, 64, 16, 64)),
        (128, 4, torch.float32, (32, 32, 16, 32)),
        (256, 4, torch.float32, (16, 16, 16, 16)),
        (256, 4, E4M3, (32, 32, 16, 16)),
        (128, 64, torch.float32, (64, 16, 64, 16)),
        (128, 64, torch.bfloat16, (64, 32, 64, 32)),
    ],
)
def test_float32_is_cut_smaller_where_there_is_less_memory(
    dim: int, group: int, cached: torch.dtype, wanted: tuple[int, int, int, int]
) -> None:
    """(queries and keys of an extend, and of a decode) on a GPU of 99 KiB: the largest that compile to no more."""
    blocks = backend._Blocks
    extend, decode = (
        blocks.of_extend(100, group, dim, 4, cached, 99 << 10),
        blocks.of_decode(group, dim, 4, cached, 99 << 10),
    )
    assert (extend.queries, extend.keys, decode.queries, decode.keys) == wanted
    roomy = blocks.of_extend(100, group, dim, 4, cached, 163 << 10)
    assert (roomy.queries, roomy.keys) == (max(32, group), 64 if dim == 64 else 32)
