# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""Numbers in 8 bits on machines without an instruction for them, against torch's own."""

import pytest
import torch

pytest.importorskip("triton", reason="these are Triton's kernels")

import triton
import triton.language as tl

from tercet.kernels.ops.store_kv import E4M3, to_e4m3
from tercet.kernels.triton.linear import fp8

BLOCK = 1024


@triton.jit
def round_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):  # noqa: N803 - as kernels are written
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, fp8.e4m3_bits(tl.load(x_ptr + at)))


@triton.jit
def widen_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, fp8.widened(tl.load(x_ptr + at), out_ptr.dtype.element_ty))


def every_code(device: torch.device) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8, device=device)


def test_rounding_is_that_of_torch(device: torch.device) -> None:
    """Around every number, around every border between two, and far beyond."""
    numbers = every_code(device).view(E4M3).float()
    numbers = numbers[numbers.isfinite()].sort().values
    borders = (numbers[1:] + numbers[:-1]) / 2
    points = torch.cat([numbers, borders])
    infinity = torch.tensor(torch.inf, device=device)
    far = torch.tensor([449.0, 464.0, 480.0, 1e30, torch.inf, torch.nan], device=device)
    beside = [torch.nextafter(points, infinity), torch.nextafter(points, -infinity)]
    x = torch.cat([points, *beside, far, -far, torch.randn(3000, device=device)])
    x = torch.nn.functional.pad(x, (0, -len(x) % BLOCK))
    out = torch.empty(len(x), dtype=torch.uint8, device=device)
    round_kernel[(len(x) // BLOCK,)](x, out, BLOCK)
    assert torch.equal(out & 0x7F, to_e4m3(x, 1.0).view(torch.uint8) & 0x7F)
    signed = ~x.isnan()
    assert torch.equal((out >> 7 == 1)[signed], x.signbit()[signed])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_code_is_widened_to_what_it_means(dtype: torch.dtype, device: torch.device) -> None:
    codes, out = every_code(device), torch.empty(256, dtype=dtype, device=device)
    widen_kernel[(1,)](codes, out, 256)
    torch.testing.assert_close(out, codes.view(E4M3).to(dtype), rtol=0, atol=0, equal_nan=True)


def test_fp8_caches_are_raw_bits_only_without_the_instruction(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, wide = torch.zeros(2, 4, 1, 16, dtype=E4M3, device=device), torch.zeros(2, device=device)
    for widens, dtype in ((True, E4M3), (False, torch.uint8)):
        monkeypatch.setattr(fp8, "_widens", lambda _, widens=widens: widens)
        assert fp8.readable(cache).dtype == dtype
        assert fp8.readable(wide) is wide
