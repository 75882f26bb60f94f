from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="these are Triton's kernels")

from tercet.kernels.ops import quantized as reference
from tercet.kernels.ops.projection import project
from tercet.kernels.tools.triton_benchmarks import QUANTISED
from tercet.kernels.triton.launch import Tiling
from tercet.kernels.triton.linear import dequantize, projection
from tercet.kernels.triton.linear import quantized as quantised
from tercet.kernels.triton.linear import quantized_gemv as quantised_row
from tercet.kernels.triton.linear.quantized import linear_quantized

BLOCKS = {
    "fp8": [(128, 128), (1, 4096), (4096, 4096)],
    "int8": [(1, 4096), (1, 16)],
    "int4": [(1, 32), (1, 128)],
    "mxfp4": [(1, 32)],
}


@pytest.mark.parametrize(("kind", "block"), [(kind, block) for kind, blocks in BLOCKS.items() for block in blocks])
@pytest.mark.parametrize("m", [1, 20, 300])
def test_linear(kind: reference.Format, block: tuple[int, int], m: int, device: torch.device) -> None:
    weight = reference.quantize(torch.randn(50, 288, device=device) * torch.rand(50, 1, device=device), kind, block)
    x, bias = torch.randn(2, m, 288, device=device), torch.randn(50, device=device)
    for given in (None, bias):
        actual, expected = linear_quantized(x, weight, given), reference.linear_quantized(x, weight, given)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("kind", "block"), [(kind, block) for kind, blocks in BLOCKS.items() for block in blocks])
@pytest.mark.parametrize("k", [256, 2048 + 256, 4096 + 512])
def test_one_row(kind: reference.Format, block: tuple[int, int], k: int, device: torch.device) -> None:
    weight = reference.quantize(torch.randn(131, k, device=device) * torch.rand(131, 1, device=device), kind, block)
    x, bias = torch.randn(1, k, device=device), torch.randn(131, device=device)
    for given in (None, bias):
        actual, expected = linear_quantized(x, weight, given), reference.linear_quantized(x, weight, given)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("size", [1.0, 2.0**40, 2.0**-40])
def test_every_code_of_one_row(kind: reference.Format, size: float, device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device)[None]
    if kind == "fp8":
        codes = torch.where(codes % 128 == 127, 0, codes)  # not a number
    elif kind == "int8":
        codes = codes.view(torch.int8)
    else:
        codes = codes[:, :128] // 4 % 16 * 17  # both halves of every byte of a word
    count = 2 * codes.shape[1] if kind == "int4" else codes.shape[1]
    zeros = torch.full((1, 1), 3.0, device=device) if kind == "int4" else None
    weight = reference.QuantizedWeight(
        format=kind, codes=codes, scales=torch.ones(1, 1, device=device), zeros=zeros, block=(1, count)
    )
    actual = [linear_quantized(x[None], weight).item() for x in torch.eye(count, device=device) * size]
    assert actual == (reference.dequantize(weight)[0] * size).tolist()


@pytest.mark.parametrize("zero", [0, 7, 15])
def test_a_zero_that_takes_off_nearly_all_of_one_row(zero: int, device: torch.device) -> None:
    """Codes are next to it, and inputs far from theirs: sums of either alone are much larger than the result."""
    codes = (zero + torch.randint(-1, 2, (24, 4096))).clamp(0, 15).to(torch.uint8)
    scales = torch.rand(24, 32) + 0.5
    zeros = torch.full_like(scales, zero)
    weight = reference.QuantizedWeight(
        format="int4", codes=reference.pack_int4(codes), scales=scales, zeros=zeros, block=(1, 128)
    )
    x = torch.randn(1, 4096) * torch.where(torch.rand(1, 4096) < 0.01, 1000.0, 1.0) + 50
    exact = x.double() @ reference.dequantize(weight).double().T
    actual = linear_quantized(x.to(device), weight.to(device)).cpu().double()
    terms = x.double().abs() @ reference.dequantize(weight).double().abs().T
    assert ((actual - exact).abs() <= terms * 2**-20).all()


@pytest.mark.parametrize(("kind", "block"), [(kind, block) for kind, blocks in BLOCKS.items() for block in blocks])
@pytest.mark.parametrize("outputs", [20, 136])
def test_gated_row(kind: reference.Format, block: tuple[int, int], outputs: int, device: torch.device) -> None:
    """Blocks end within the rows of a program, of which there are as many as it takes, or fewer."""
    weight = reference.quantize(torch.randn(2 * outputs, 512, device=device), kind, block)
    x, bias = torch.randn(1, 512, device=device), torch.randn(2 * outputs, device=device)
    actual, expected = (op(x, weight, bias, gate="silu") for op in (projection.project, project))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(("kind", "block"), [(kind, block) for kind, blocks in BLOCKS.items() for block in blocks])
@pytest.mark.parametrize("k", [288, 4096 + 32])
def test_weights_in_full(kind: reference.Format, block: tuple[int, int], k: int, device: torch.device) -> None:
    weight = reference.quantize(torch.randn(50, k, device=device) * torch.rand(50, 1, device=device), kind, block)
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(dequantize.dequantize(weight, dtype), reference.dequantize(weight, dtype))


@pytest.mark.parametrize(
    ("run", "rows", "tiling"),
    [
        *((quantised_row.gemv, 1, tiling) for tiling in quantised_row.TILINGS),
        *((quantised.tiled_linear, 70, tiling) for tiling in quantised.TILINGS),
        *((quantised.full_linear, 3, tiling) for tiling in dequantize.TILINGS),
    ],
)
@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_every_tiling_equals_the_reference(
    run: Callable[..., torch.Tensor], rows: int, tiling: Tiling, kind: reference.Format, device: torch.device
) -> None:
    weight = reference.quantize(torch.randn(70, 768, device=device), kind, (1, 128))
    x = torch.randn(rows, 768, device=device)
    expected = reference.linear_quantized(x, weight)
    torch.testing.assert_close(run(x, weight, None, tiling=tiling), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("m", "k"), [(3, 64), (1, 512)])
def test_zeros_of_their_own_and_half_precision(m: int, k: int, device: torch.device) -> None:
    codes = torch.randint(0, 16, (40, k), dtype=torch.uint8, device=device)
    scales, zeros = torch.rand(40, k // 32, device=device), torch.randint(0, 16, (40, k // 32), device=device).float()
    weight = reference.QuantizedWeight(
        format="int4", codes=reference.pack_int4(codes), scales=scales, zeros=zeros, block=(1, 32)
    )
    x = torch.randn(m, k, device=device).half()
    torch.testing.assert_close(linear_quantized(x, weight), reference.linear_quantized(x, weight), rtol=4e-3, atol=4e-2)


@pytest.mark.parametrize("m", [1, 20, 300])
def test_every_code_and_scale_of_mxfp4(m: int, device: torch.device) -> None:
    """By tiles and in full: what a weight is comes out where its input alone is 1."""
    codes = torch.arange(16, dtype=torch.uint8, device=device).repeat(120, 4)
    scales = torch.randint(100, 140, (120, 2), dtype=torch.uint8, device=device)
    weight = reference.QuantizedWeight(
        format="mxfp4", codes=reference.pack_int4(codes), scales=scales, zeros=None, block=(1, 32)
    )
    x = torch.eye(64, device=device).repeat(5, 1)[:m]
    assert torch.equal(linear_quantized(x, weight), reference.dequantize(weight).T.repeat(5, 1)[:m])


def test_unsupported_block_sizes_are_refused(device: torch.device) -> None:
    weight = reference.quantize(torch.ones(4, 96, device=device), "int8", (1, 48))
    with pytest.raises(ValueError, match="blocks of 48 columns"):
        linear_quantized(torch.ones(1, 96, device=device), weight)


def test_few_outputs_take_tilings_with_more_warps() -> None:
    full = torch.randn(64, 4096)
    for kind, block in QUANTISED:
        few = reference.quantize(full, kind, block)
        many = replace(few, codes=few.codes.repeat(512, 1))
        assert quantised_row._tiling(few, 132) == quantised_row.TILINGS[1]
        assert quantised_row._tiling(many, 132) == quantised_row.TILINGS[0]
