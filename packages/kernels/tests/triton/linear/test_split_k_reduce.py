import pytest
import torch

pytest.importorskip("triton", reason="these are Triton's kernels")

from packages.kernels.tests.pairwise import pairwise
from tercet.kernels.ops import quantized as reference
from tercet.kernels.triton.launch import Tiling
from tercet.kernels.triton.linear import quantized as quantised
from tercet.kernels.triton.linear.split_k_reduce import add_splits, splits_for

WEIGHTS: list[tuple[reference.Format, tuple[int, int], int]] = [
    ("fp8", (128, 128), 1187),
    ("fp8", (1, 4096), 1187),
    ("fp8", (4096, 4096), 1187),
    ("int8", (1, 4096), 1187),
    ("int8", (1, 256), 1187),
    ("int4", (1, 32), 1184),
    ("int4", (1, 256), 1184),
    ("mxfp4", (1, 32), 1184),
]
"""Of no whole number of blocks of inputs (10 of 128), with splits that end within a block of 256 that share a scale."""
CUTS = [(1, 2), (20, 4), (70, 8), (3, 16)]
"""Rows and splits."""

PROCESSORS = 132
LLAMA = {"qkv": (6144, 4096), "o": (4096, 4096), "gate and up": (28672, 4096), "down": (4096, 14336)}


@pytest.mark.usefixtures("nan_in_unwritten_memory")
@pytest.mark.parametrize(("given_weight", "cut", "tiling"), pairwise(WEIGHTS, CUTS, quantised.TILINGS[:3]))
def test_splits(
    given_weight: tuple[reference.Format, tuple[int, int], int],
    cut: tuple[int, int],
    tiling: Tiling,
    device: torch.device,
) -> None:
    """Of 16 splits some have no block."""
    (kind, block, k), (m, splits) = given_weight, cut
    weight = reference.quantize(torch.randn(71, k, device=device) * torch.rand(71, 1, device=device), kind, block)
    x, bias = torch.randn(m, k, device=device), torch.randn(71, device=device)
    given = None if tiling == quantised.TILINGS[0] else bias
    actual = quantised.tiled_linear(x, weight, given, tiling=tiling, splits=splits)
    torch.testing.assert_close(actual, reference.linear_quantized(x, weight, given), rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("nan_in_unwritten_memory")
@pytest.mark.parametrize("cut", CUTS)
def test_sums_of_splits_are_the_same_again(cut: tuple[int, int], device: torch.device) -> None:
    m, splits = cut
    weight = reference.quantize(torch.randn(71, 1187, device=device), "int8", (1, 256))
    x = torch.randn(m, 1187, device=device)
    first, second = (quantised.tiled_linear(x, weight, None, splits=splits) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.usefixtures("nan_in_unwritten_memory")
@pytest.mark.parametrize("kind", ["fp8", "int8", "int4", "mxfp4"])
def test_few_outputs_take_split_k(kind: reference.Format, device: torch.device) -> None:
    """Of inputs whose rows lie apart."""
    k = 2048 + 32
    assert quantised._cut(71, 32, k, PROCESSORS) == (Tiling(32, 4), 2)
    weight = reference.quantize(torch.randn(71, k, device=device), kind, (1, 128))
    x, bias = torch.randn(2, 10, 2 * k, device=device)[..., :k], torch.randn(71, device=device)
    actual, expected = (op(x, weight, bias) for op in (quantised.linear_quantized, reference.linear_quantized))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("splits", [2, 4, 8])
def test_sums_are_rounded_once(splits: int, device: torch.device) -> None:
    """Of whole numbers: exact in float32, while float16 knows every eighth or sixteenth of so large ones."""
    codes = torch.randint(-127, 128, (70, 2048), dtype=torch.int8, device=device)
    weight = reference.QuantizedWeight(
        format="int8", codes=codes, scales=torch.ones(1, 1, device=device), zeros=None, block=(70, 2048)
    )
    x, bias = torch.randint(-4, 5, (20, 2048), device=device), torch.randint(-999, 999, (70,), device=device).half()
    exact = (x.double() @ codes.double().T + bias.double()).half()
    assert torch.equal(quantised.tiled_linear(x.half(), weight, bias, splits=splits), exact)


def test_parts_are_added_in_their_order(device: torch.device) -> None:
    parts, bias = torch.randn(8, 5, 211, device=device), torch.randn(211, device=device)
    expected = torch.zeros(5, 211, device=device)
    for part in parts:
        expected += part
    out = torch.empty(5, 211, device=device)
    add_splits(parts, None, out)
    assert torch.equal(out, expected)
    add_splits(parts, bias, out)
    assert torch.equal(out, expected + bias)


@pytest.mark.parametrize(
    ("layer", "rows", "block", "splits"),
    [
        *(("qkv", rows, 128, 4) for rows in (16, 32, 64)),
        ("qkv", 128, 128, 2),
        *(("o", rows, 64, 4) for rows in (16, 32, 64)),
        ("o", 128, 64, 2),
        *(("gate and up", rows, 128, 1) for rows in (16, 32, 64, 128)),
        *(("down", rows, 128, 8) for rows in (16, 32, 64)),
        ("down", 128, 128, 4),
    ],
)
def test_few_outputs_give_enough_programs(layer: str, rows: int, block: int, splits: int) -> None:
    """For layers of Llama-3.1-8B on an H200: one to two programs for each of its multiprocessors."""
    n, k = LLAMA[layer]
    assert quantised._cut(n, rows, k, PROCESSORS) == (Tiling(block, 4), splits)
    programs = n // block * -(-rows // 64) * splits
    assert 1.4 * PROCESSORS <= programs <= 4 * PROCESSORS
    assert k // splits >= 1024, "8 blocks or more"
    assert splits == 1 or 2 * 4 * splits * rows <= k / 2, "parts that are written and read again are half of a weight"


def test_there_are_no_more_splits_than_are_wanted_or_worth_it() -> None:
    assert splits_for(programs=200, rows=16, k=14336, wanted=185) == 1
    assert splits_for(programs=100, rows=16, k=14336, wanted=185) == 2
    assert splits_for(programs=1, rows=16, k=1 << 20, wanted=185) == 16
    assert splits_for(programs=1, rows=16, k=4096, wanted=185) == 4
    assert splits_for(programs=1, rows=128, k=4096, wanted=185) == 2
    assert splits_for(programs=1, rows=16, k=2047, wanted=185) == 1


def test_larger_shared_memory_allows_more_stages() -> None:
    room, little = 227 << 10, 99 << 10
    assert [quantised._stages(32, block, room, split=True) for block in (128, 64, 32)] == [4, 5, 5]
    assert quantised._stages(64, 128, room, split=True) == quantised._stages(16, 64, little, split=True) == 3
    assert quantised._stages(32, 64, room, split=False) == 3
