"""Long prompts over latents in expanded form, against the naive reference over latents."""

import pytest
import torch
from torch.nn.attention import SDPBackend

from packages.kernels.tests.attention.test_backends import PAGE, make_batch
from packages.kernels.tests.attention.test_prompts import Counted
from tercet.kernels.attention.api import AttentionParams, ExpandingBackend, LatentQueries
from tercet.kernels.attention.latent import absorbed, latent_caches, values_of
from tercet.kernels.attention.prompt_latents import PromptLatent, with_wide_values
from tercet.kernels.attention.prompts import padded_length, sdpa
from tercet.kernels.attention.reference import ReferenceLatent
from tercet.kernels.attention.torch_native import TorchNativeLatent

HEADS, RANK, ROPE, NOPE, VALUE = 3, 24, 8, 16, 12
LEAST = 6
MATH = sdpa(SDPBackend.MATH)
PARAMS = AttentionParams(scale=0.3)

CASES = {
    "a prompt alone": ((40, 40),),
    "two prompts": ((9, 9), (30, 30)),
    "beside decodes": ((1, 5), (1, 33), (12, 12)),
    "before the rest": ((16, 16), (5, 5), (3, 40)),
}

Rows = tuple[tuple[int, int], ...]


def given(rows: Rows, dtype: torch.dtype) -> tuple[LatentQueries, torch.Tensor]:
    """Queries with projections, and cached vectors."""
    torch.manual_seed(0)
    tokens = sum(new for new, _ in rows)
    sizes = ((tokens, HEADS, NOPE), (tokens, HEADS, ROPE), (HEADS, NOPE, RANK), (HEADS, VALUE, RANK))
    queries = LatentQueries(*((torch.randn(size) / 3).to(dtype) for size in sizes))
    return queries, torch.randn(256, PAGE, RANK + ROPE).to(dtype)


def expected(rows: Rows, queries: LatentQueries, cache: torch.Tensor) -> torch.Tensor:
    reference = ReferenceLatent()
    reference.plan(make_batch(rows, 256))
    wide = LatentQueries(*(part.double() for part in queries))
    return values_of(reference.attend(absorbed(wide), *latent_caches(cache.double(), RANK), PARAMS), wide.w_uv)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", CASES.values(), ids=CASES.keys())
def test_equals_the_reference(rows: Rows, dtype: torch.dtype) -> None:
    kernel = Counted(MATH)
    backend = PromptLatent(TorchNativeLatent, [kernel], LEAST)
    assert isinstance(backend, ExpandingBackend)
    queries, cache = given(rows, dtype)
    for _ in range(2):
        backend.plan(make_batch(rows, 256))
        assert backend.expands
        out = backend.attend_expanded(queries, latent_caches(cache, RANK)[0], PARAMS)
        tolerance = 1e-5 if dtype == torch.float32 else 0.03
        torch.testing.assert_close(out.double(), expected(rows, queries, cache), rtol=tolerance, atol=tolerance)
    long = [new for new, kept in rows if new == kept >= LEAST]
    assert kernel.lengths[1:] == [padded_length(length) for length in long] * 2, "the first is the trial"


def test_steps_without_long_prompts_are_not_expanded() -> None:
    backend = PromptLatent(TorchNativeLatent, [MATH], LEAST)
    backend.plan(make_batch(((1, 4), (5, 5), (9, 12)), 256))
    assert not backend.expands


@pytest.mark.parametrize("first", ["refuses", "is wrong"])
def test_the_first_kernel_that_is_right_is_used(first: str) -> None:
    def other(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        if first == "refuses":
            raise RuntimeError("no values of another size")
        return MATH(q, k, v, scale) + 1

    bad, good = Counted(other), Counted(with_wide_values(MATH))
    rows = CASES["before the rest"]
    queries, cache = given(rows, torch.float32)
    backend = PromptLatent(TorchNativeLatent, [bad, good], LEAST)
    backend.plan(make_batch(rows, 256))
    out = backend.attend_expanded(queries, latent_caches(cache, RANK)[0], PARAMS)
    torch.testing.assert_close(out.double(), expected(rows, queries, cache), rtol=1e-5, atol=1e-5)
    assert (len(bad.lengths), len(good.lengths)) == (1, 2)


def test_without_a_kernel_the_other_backend_computes_all() -> None:
    rows = CASES["before the rest"]
    queries, cache = given(rows, torch.float32)
    backend = PromptLatent(TorchNativeLatent, [], LEAST)
    backend.plan(make_batch(rows, 256))
    out = backend.attend_expanded(queries, latent_caches(cache, RANK)[0], PARAMS)
    torch.testing.assert_close(out.double(), expected(rows, queries, cache), rtol=1e-5, atol=1e-5)


def test_values_are_widened_for_kernels_that_need_it() -> None:
    q, k, v = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 12)
    widths = list[int]()

    def wide(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        widths.append(v.shape[3])
        return MATH(q, k, v, scale)

    torch.testing.assert_close(with_wide_values(wide)(q, k, v, 0.25), MATH(q, k, v, 0.25))
    assert widths == [16]
