"""Weights in blocks against their definition: every format, block, scale type, odd sizes, few rows and many."""

from dataclasses import replace

import pytest
import torch

from tercet.kernels.native.blocks import Activations, pack_blocks
from tercet.kernels.native.library import Library
from tercet.kernels.ops.quantized import QuantizedWeight, dequantize, pack_int4, round_activations

ROWS = [1, 2, 3, 5, 8, 13, 16, 31, 33, 70]
KINDS = ["steps", "steps and minimums", "halves", "halves and minimums", "floats", "floats and minimums", "zero"]


def weight_of(n: int, k: int, bits: int, block: int, kind: str) -> QuantizedWeight:
    """Return random weights; `kind` says which numbers scales and minimums are."""
    count = -(-k // block)
    codes = torch.randint(0, 16, (n, k)) if bits == 4 else torch.randint(-128, 128, (n, k))
    units = torch.randn(n, -(-k // 256)).half().float().repeat_interleave(256 // block, 1)[:, :count]

    def values() -> torch.Tensor:
        if kind.startswith("steps"):
            return units * torch.randint(-32, 64, (n, count))
        wide = torch.randn(n, count) * torch.randn(n, count).mul(2).exp().clamp(max=1e3)
        return wide if kind.startswith("floats") else wide.half().float()

    scales, minimums = values(), values() if "minimums" in kind else None
    if kind == "zero":
        minimums = scales * -8
    format_, packed = ("int4", pack_int4(codes)) if bits == 4 else ("int8", codes.to(torch.int8))
    return QuantizedWeight(
        format=format_,  # type: ignore[arg-type]
        codes=packed,
        scales=scales,
        zeros=None,
        block=(1, block),
        minimums=minimums,
    )


def error(actual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> float:
    """Return the largest error of a product, relative to the largest sum of sizes of its terms."""
    x, weight = x.double(), weight.double()
    return float((actual - x @ weight.T - bias).abs().max() / (x.abs() @ weight.abs().T + bias.abs()).max())


def check(library: Library, weight: QuantizedWeight, activations: Activations) -> None:
    exact = dequantize(weight)
    bias = torch.randn(weight.shape[0])
    packed = pack_blocks(library, weight, bias, activations=activations)
    for rows in ROWS:
        x = torch.randn(rows, weight.shape[1]) * torch.randn(rows, 1).exp()
        given = x if activations == "float32" else round_activations(x)
        assert error(packed(x), given, exact, bias) < 3e-6


@pytest.mark.parametrize("activations", ["int8", "float32"])
@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_dequantized_product(
    library: Library, kind: str, bits: int, block: int, activations: Activations
) -> None:
    for n, k in ((1, 32), (50, 96), (33, 544)):
        check(library, weight_of(n, k, bits, block, kind), activations)


@pytest.mark.parametrize("activations", ["int8", "float32"])
@pytest.mark.parametrize(("n", "k"), [(16, 1), (7, 100), (40, 1000)])
def test_inputs_need_not_fill_blocks(library: Library, n: int, k: int, activations: Activations) -> None:
    for block in (16, 32):
        check(library, weight_of(n, k, 8, block, "halves and minimums"), activations)


@pytest.mark.parametrize(
    ("kind", "bits", "block", "expected"),
    [
        ("zero", 4, 32, 4.5),
        ("halves and minimums", 4, 32, 5.0),
        ("halves", 8, 32, 8.5),
        ("steps and minimums", 4, 32, 4.75),
        ("steps and minimums", 4, 16, 5.25),
        ("steps", 8, 16, 8.625),
        ("floats and minimums", 4, 32, 6.0),
    ],
)
def test_weights_stay_in_few_bits(library: Library, kind: str, bits: int, block: int, expected: float) -> None:
    packed = pack_blocks(library, weight_of(32, 512, bits, block, kind))
    assert packed.bytes * 8 / (32 * 512) == expected


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_read_back_exactly(library: Library, kind: str, bits: int) -> None:
    weight = weight_of(50, 320, bits, 16, kind)
    every = torch.arange(50)
    exact = dequantize(replace(weight, scales=weight.scales.double()))
    largest = float(weight.scales.abs().max()) * 2**bits  # of the two terms whose difference is rounded
    rounding = 2 * torch.finfo(torch.float32).eps * largest
    torch.testing.assert_close(pack_blocks(library, weight).rows(every), exact.float(), rtol=1e-6, atol=rounding)


@pytest.mark.parametrize("activations", ["int8", "float32"])
@pytest.mark.parametrize(("bits", "block", "kind"), [(4, 32, "floats"), (4, 16, "steps and minimums"), (8, 32, "zero")])
def test_a_row_has_the_same_bits_beside_any_others(
    library: Library, bits: int, block: int, kind: str, activations: Activations
) -> None:
    x, weight = torch.randn(70, 1120), weight_of(50, 1120, bits, block, kind)
    packed = pack_blocks(library, weight, activations=activations)
    each = torch.cat([packed(row) for row in torch.split(x, 1)])
    for rows in (2, 3, 4, 7, 8, 13, 16, 30, 35, 70):
        assert torch.equal(packed(x[-rows:]), each[-rows:])


@pytest.mark.parametrize("sizes", [(32, 16, 9), (30, 5, 15)])
def test_pieces_may_differ_in_format_and_block(library: Library, sizes: tuple[int, int, int]) -> None:
    kinds = [(4, 32, "zero"), (8, 16, "steps"), (4, 16, "halves and minimums")]
    pieces = [weight_of(n, 64, bits, block, kind) for n, (bits, block, kind) in zip(sizes, kinds, strict=True)]
    x, bias = torch.randn(5, 64), torch.randn(sum(sizes))
    exact = torch.cat([dequantize(piece) for piece in pieces])
    assert error(pack_blocks(library, pieces, bias)(x), round_activations(x), exact, bias) < 3e-6


@pytest.mark.parametrize("size", [16, 21])
def test_gate_and_up_may_come_apart(library: Library, size: int) -> None:
    weight, bias = weight_of(2 * size, 64, 4, 32, "steps and minimums"), torch.randn(2 * size)
    halves = [weight.part(rows, range(64)) for rows in (range(size), range(size, 2 * size))]
    whole = pack_blocks(library, weight, bias, interleave=True)
    assert torch.equal(pack_blocks(library, halves, bias, interleave=True).panels, whole.panels)
    with pytest.raises(ValueError, match="two, of one size"):
        pack_blocks(library, halves[:1] * 3, interleave=True)


def test_wide_groups_and_zeros_are_packed_too(library: Library) -> None:
    weight = weight_of(40, 256, 4, 128, "halves")
    weight = replace(weight, zeros=torch.randint(0, 16, weight.scales.shape).float())
    for activations in ("int8", "float32"):
        check(library, weight, activations)


@pytest.mark.parametrize("activations", ["int8", "float32"])
def test_a_nan_stays_in_its_row(library: Library, activations: Activations) -> None:
    packed = pack_blocks(library, weight_of(40, 64, 4, 32, "halves and minimums"), activations=activations)
    x = torch.randn(20, 64)
    healthy = packed(x)
    x[3, 5] = torch.nan
    out = packed(x)
    assert out[3].isnan().all()
    others = [row for row in range(20) if row != 3]
    assert torch.equal(out[others], healthy[others])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_scale_shows_in_its_output_alone(library: Library, bad: float) -> None:
    weight, x = weight_of(40, 64, 4, 32, "steps and minimums"), torch.randn(20, 64)
    healthy = pack_blocks(library, weight)(x)
    weight.scales[17, 1] = bad
    out = pack_blocks(library, weight)(x)
    assert not out[:, 17].isfinite().any()
    others = [column for column in range(40) if column != 17]
    torch.testing.assert_close(out[:, others], healthy[:, others], rtol=1e-5, atol=1e-4)


def test_other_weights_are_refused(library: Library) -> None:
    weight = weight_of(40, 96, 8, 16, "floats")
    with pytest.raises(ValueError, match=r"int8 with blocks \[1, 24\] is not packed"):
        pack_blocks(library, replace(weight, block=(1, 24)))
    with pytest.raises(ValueError, match="fp8"):
        pack_blocks(library, replace(weight, format="fp8"))
    with pytest.raises(ValueError, match="of one width"):
        pack_blocks(library, [weight, weight_of(40, 64, 8, 16, "floats")])
    with pytest.raises(ValueError, match=r"a bias \[3\] for 40 outputs"):
        pack_blocks(library, weight, torch.randn(3))
