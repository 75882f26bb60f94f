"""Decodes that rotate and store what is new as they attend, beside the two kernels that did it one after the other.

Both must give the same bits, in the output and in the cache. What the interpreter cannot show is the barrier between
storing and streaming: there a program is one thread.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("triton", reason="these are Triton's kernels")

from packages.kernels.tests.pairwise import pairwise
from packages.kernels.tests.triton.wide_tables import with_wide_table
from tercet.kernels.attention import triton as backend
from tercet.kernels.attention import triton_plan
from tercet.kernels.attention.api import AttentionBatch, AttentionParams, NewTokens, RotatingBackend
from tercet.kernels.attention.torch_native import TorchNativeAttention
from tercet.kernels.device import default_device
from tercet.kernels.ops.rope import rope_cache
from tercet.kernels.ops.store_kv import E4M3
from tercet.kernels.tools.check import make_batch
from tercet.kernels.triton import missing_triton
from tercet.kernels.triton.attention.rope import rope_store
from tercet.kernels.triton.linear import fp8

DEVICE = default_device()
LONGEST = 700

pytestmark = pytest.mark.skipif(bool(missing_triton(DEVICE)), reason=missing_triton(DEVICE))


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows of such lengths, each with its new token, and the model that they belong to."""

    lengths: tuple[int, ...] = (70, 1, 17, 300)
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    page_size: int = 16
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    norms: bool = False
    wide_norms: bool = False
    dtype: torch.dtype = torch.float32
    cached: torch.dtype | None = None
    width: int = 0
    """Of the page table, if it is wider than it has to be."""
    scales: tuple[float, float] = (1.0, 1.0)

    @property
    def params(self) -> AttentionParams:
        sinks = torch.linspace(-2, 2, self.heads[0], device=DEVICE) if self.sinks else None
        return AttentionParams(scale=self.head_dim**-0.5, window=self.window, softcap=self.softcap, sinks=sinks)


@dataclass(frozen=True, eq=False)
class Step:
    """What a layer is given. `caches` [2, pages, page_size, kv_heads, head_dim] are infinite where new tokens go."""

    batch: AttentionBatch
    q: torch.Tensor
    new: NewTokens
    caches: torch.Tensor

    @classmethod
    def of(cls, case: Case) -> "Step":
        batch = make_batch([(1, length) for length in case.lengths], case.page_size, DEVICE)
        (heads, kv_heads), rows, dim = case.heads, len(case.lengths), case.head_dim
        pages = int(batch.page_table.max()) + 1
        if case.width:
            batch = with_wide_table(batch, case.width)
        caches = torch.randn(2, pages, case.page_size, kv_heads, dim, device=DEVICE).to(case.cached or case.dtype)
        projection = torch.randn(rows, heads + 2 * kv_heads, dim, device=DEVICE).to(case.dtype)
        q, k, v = torch.split(projection, [heads, kv_heads, kv_heads], 1)
        weights = (torch.randn(2, dim, device=DEVICE) + 1).to(torch.float32 if case.wide_norms else case.dtype)
        new = NewTokens(
            k=k,
            v=v,
            positions=batch.kv_lens.long() - 1,
            table=rope_cache(LONGEST, dim, 100.0).to(DEVICE),
            norms=(weights[0], weights[1]) if case.norms else None,
            eps=1e-6,
            scales=case.scales,
        )
        unwritten = caches.view(torch.uint8) if case.cached == E4M3 else caches
        unwritten.flatten(1, 2)[:, batch.slot_mapping] = 0x7F if case.cached == E4M3 else torch.inf
        return cls(batch, q, new, caches)

    def one_kernel(self, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
        """(the output, the caches), of new tokens that are rotated and stored by the kernel that attends."""
        caches, attention = self.caches.clone(), backend.TritonAttention()
        attention.plan(self.batch)
        return attention.attend_new(self.q, caches[0], caches[1], self.new, case.params), caches

    def two_kernels(self, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
        """The same by `rope_store` and `attend`."""
        caches, attention, new = self.caches.clone(), backend.TritonAttention(), self.new
        attention.plan(self.batch)
        given = (self.q, new.k, new.v, new.positions, new.table, caches[0], caches[1], self.batch.slot_mapping)
        q = rope_store(*given, norms=new.norms, eps=new.eps, scales=new.scales)
        return attention.attend(q, caches[0], caches[1], case.params, case.scales[0]), caches


@pytest.mark.usefixtures("nan_in_unwritten_memory")
@pytest.mark.parametrize("processors", [1, 64], ids=["merged by the last", "merged by a kernel"])
@pytest.mark.parametrize("window", [0, 200])
def test_splits_that_a_row_has_no_keys_for_leave_nothing_behind(
    processors: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_plan, "multiprocessors", lambda _: processors)
    monkeypatch.setattr(triton_plan, "_LONG", 128)
    check(Case(lengths=(300, 7, 128, 129, 500, 1), width=512, window=window, sinks=True, norms=True, head_dim=32))


def check(case: Case) -> None:
    torch.manual_seed(0)
    step = Step.of(case)
    (out, caches), (expected, stored) = step.one_kernel(case), step.two_kernels(case)
    if DEVICE.type == "cpu" and not (case.norms and case.head_dim == 192):  # whose squares numpy adds in another order
        assert torch.equal(out, expected)
        assert torch.equal(caches.view(torch.uint8), stored.view(torch.uint8))
    else:  # where sums of squares, and products with a sum, may be rounded in another order
        coarse, cached = (max(1e-5, 4 * torch.finfo(dtype).eps) for dtype in (case.dtype, caches.dtype))
        torch.testing.assert_close(out, expected, rtol=coarse, atol=coarse)
        torch.testing.assert_close(caches.float(), stored.float(), rtol=cached, atol=cached, equal_nan=True)
    assert out.isfinite().all()
    assert not torch.equal(caches.view(torch.uint8), step.caches.view(torch.uint8))


@pytest.fixture(params=["in order", "in reverse"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of programs, which the interpreter runs one after the other: none may need what another has stored."""
    if request.param == "in reverse":
        if DEVICE.type != "cpu":
            pytest.skip("a GPU runs programs in its own order")
        reverse(monkeypatch)
    return str(request.param)


def reverse(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import interpreter_builder as builder

    set_index = builder.set_grid_idx

    def backwards(*index: int) -> None:
        set_index(*(count - 1 - at for count, at in zip(builder.grid_dim, index, strict=True)))

    monkeypatch.setattr(builder, "set_grid_idx", backwards)


@pytest.mark.parametrize("processors", [1, 4, 64])
@pytest.mark.parametrize("window", [0, 130])
def test_one_split_and_many(processors: int, window: int, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merged by nobody, by the last of four, and by a kernel; a row ends in its first split, its last or another."""
    monkeypatch.setattr(triton_plan, "multiprocessors", lambda _: processors)
    monkeypatch.setattr(triton_plan, "_SPLIT", 64)
    check(Case(lengths=(520, 3, 64, 257, 65), head_dim=16, window=window, sinks=True))


@pytest.mark.parametrize(("head_dim", "page_size", "norms"), pairwise([16, 80, 96, 128], [1, 16, 64], [False, True]))
def test_pages_and_heads(head_dim: int, page_size: int, norms: bool) -> None:
    check(Case(lengths=(70, 1, 16), heads=(6, 2), head_dim=head_dim, page_size=page_size, norms=norms))


@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (3, 3), (40, 2)])
def test_groups(heads: tuple[int, int]) -> None:
    check(Case(lengths=(40, 2), heads=heads, head_dim=16, softcap=20.0, norms=True))


@pytest.mark.parametrize("norms", [False, True])
def test_half_precision(norms: bool) -> None:
    check(Case(head_dim=128, dtype=torch.float16, norms=norms))
    check(Case(head_dim=128, dtype=torch.float16, norms=norms, wide_norms=True))
    check(Case(lengths=(33,), dtype=torch.float16, cached=torch.float32, norms=norms))


@pytest.mark.parametrize("widens", [False, True])
@pytest.mark.parametrize("norms", [False, True])
def test_8_bits_with_and_without_the_instruction(widens: bool, norms: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "_widens", lambda _: widens)
    check(Case(lengths=(70, 1), cached=E4M3, scales=(0.3, 0.03), norms=norms))


def test_rows_that_pad_a_graph_disturb_no_other() -> None:
    """Several, all alike, write one slot of a page that is nobody's."""
    case = Case(lengths=(70, 5, 1, 1, 1))
    step = Step.of(case)
    for rows in (step.q, step.new.k, step.new.v):
        rows[3:] = rows[2]
    spare = torch.tensor(len(step.caches[0]), device=DEVICE)
    caches = torch.cat([step.caches, torch.full_like(step.caches[:, :1], torch.inf)], 1)
    pages, slots = step.batch.page_table.clone(), step.batch.slot_mapping.clone()
    pages[2:, 0], slots[2:] = spare, spare * case.page_size
    padded = replace(step, batch=replace(step.batch, page_table=pages, slot_mapping=slots), caches=caches)
    (out, _), (expected, _) = padded.one_kernel(case), step.one_kernel(case)
    assert torch.equal(out[:2], expected[:2])
    assert out.isfinite().all()


def test_only_decodes_are_rotated() -> None:
    step = Step.of(Case())
    attention = backend.TritonAttention()
    attention.plan(make_batch([(1, 4), (3, 3)], 16, DEVICE))
    with pytest.raises(ValueError, match="more than one new token"):
        attention.attend_new(step.q, step.caches[0], step.caches[1], step.new, AttentionParams(scale=1.0))


@pytest.mark.parametrize(
    "change",
    [
        lambda new: replace(new, table=new.table[:, :32]),
        lambda new: replace(new, k=new.k.transpose(1, 2).contiguous().transpose(1, 2)),
        lambda new: replace(new, v=new.v[..., ::2]),
    ],
)
def test_tensors_without_whole_heads_are_refused(change: Callable[[NewTokens], NewTokens]) -> None:
    step = Step.of(Case())
    attention = backend.TritonAttention()
    attention.plan(step.batch)
    with pytest.raises(ValueError, match="heads of"):
        attention.attend_new(step.q, step.caches[0], step.caches[1], change(step.new), AttentionParams(scale=1.0))


def test_rotating_backends_are_recognized() -> None:
    assert isinstance(backend.TritonAttention(), RotatingBackend)
    assert not isinstance(TorchNativeAttention(), RotatingBackend)


GRID = list(
    itertools.product(
        [64, 80, 128, 192, 256],
        [1, 16, 64],
        [(8, 8), (8, 2), (6, 1)],
        [(0, 0.0, False), (33, 0.0, True), (0, 30.0, False)],
        [False, True],
    )
)


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "page_size", "heads", "options", "norms"), GRID)
def test_the_grid(
    head_dim: int, page_size: int, heads: tuple[int, int], options: tuple[int, float, bool], norms: bool
) -> None:
    window, softcap, sinks = options
    check(
        Case(
            lengths=(1, 17, 130, 513, 64),
            heads=heads,
            head_dim=head_dim,
            page_size=page_size,
            window=window,
            softcap=softcap,
            sinks=sinks,
            norms=norms,
            dtype=torch.float32 if DEVICE.type == "cpu" else torch.bfloat16,
        )
    )
