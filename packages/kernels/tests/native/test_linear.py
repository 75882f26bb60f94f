"""Packed linear layers against plain torch ones: every format, odd sizes, few rows and many."""

import pytest
import torch

from tercet.kernels.native.library import Library
from tercet.kernels.native.linear import Quantization, pack_linear, pack_linears
from tercet.kernels.ops.linear import linear, linear_int4, linear_int8, quantize_int4, quantize_weight

SIZES = [(1, 1), (16, 32), (7, 100), (50, 64), (160, 576), (33, 1000)]
ROWS = [1, 2, 3, 4, 5, 8, 13, 16, 31, 32, 33, 70]


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return float((actual - exact).abs().max() / exact.abs().max().clamp(min=1e-30))


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_equals_torch(library: Library, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
    packed, plain = pack_linear(library, weight, bias), pack_linear(library, weight)
    for rows in ROWS:
        x = torch.randn(rows, inputs)
        assert relative_error(packed(x), linear(x, weight, bias)) < 1e-5
        assert relative_error(plain(x), linear(x, weight)) < 1e-5


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_int8_equals_torch(library: Library, outputs: int, inputs: int) -> None:
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
    packed = pack_linear(library, weight, bias, quantization="int8")
    for rows in ROWS:
        x = torch.randn(rows, inputs) * torch.randn(rows, 1).exp()
        assert relative_error(packed(x), linear_int8(x, *quantize_weight(weight), bias)) < 1e-5


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_int4_equals_torch(library: Library, outputs: int, inputs: int) -> None:
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
    packed = pack_linear(library, weight, bias, quantization="int4")
    for rows in ROWS:
        x = torch.randn(rows, inputs) * torch.randn(rows, 1).exp()
        assert relative_error(packed(x), linear_int4(x, *quantize_int4(weight), bias)) < 1e-5


def test_int4_at_its_extremes_does_not_overflow(library: Library) -> None:
    x, weight = torch.full((3, 320), 5.0), torch.full((40, 320), -0.75)
    x[1] = -5.0
    for largest in (weight, -weight):  # steps of 0 and of 15
        largest[:, ::32] *= -8 / 7
        packed = pack_linear(library, largest, quantization="int4")
        assert relative_error(packed(x), linear_int4(x, *quantize_int4(largest))) < 1e-5


def test_int4_is_near_what_it_rounds(library: Library) -> None:
    weight, x = torch.randn(200, 800), torch.randn(9, 800)
    packed = pack_linear(library, weight, quantization="int4")
    error = (packed(x) - linear(x, weight)).square().mean() / linear(x, weight).square().mean()
    assert error.sqrt() < 0.12
    assert packed.bytes < 0.15 * weight.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_weights_are_rounded_to_the_bit_as_in_torch(
    library: Library, outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    weight = (torch.randn(outputs, inputs) * torch.randn(outputs, 1).exp()).to(dtype)
    weight[-1, inputs // 2 :] = 0
    every = torch.arange(outputs)
    steps, scales = quantize_weight(weight)
    packed = pack_linear(library, weight, quantization="int8")
    assert packed.scales is not None
    assert torch.equal(packed.scales[:outputs], scales)
    assert torch.equal(packed.rows(every), steps.float() * scales[:, None])
    steps, scales = quantize_int4(weight)
    packed = pack_linear(library, weight, quantization="int4")
    meant = (steps.float() - 8) * scales.float().repeat_interleave(32, 1)
    assert torch.equal(packed.rows(every), meant[:, :inputs])


def test_of_two_that_are_largest_the_first_sets_the_sign(library: Library) -> None:
    weight = torch.tensor([[0.0, 1.0, -1.0, 0.5] * 8, [0.0, -1.0, 1.0, 0.5] * 8])
    packed = pack_linear(library, weight, quantization="int4")
    assert packed.rows(torch.arange(2))[:, :4].tolist() == [[0.0, 1.0, -0.875, 0.5], [0.0, -1.0, 0.875, 0.5]]


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("sizes", [(32, 16, 9), (30, 5, 15), (1, 1)])
def test_pieces_are_packed_as_the_whole(library: Library, quantization: Quantization, sizes: tuple[int, ...]) -> None:
    weight, bias, x = torch.randn(sum(sizes), 40), torch.randn(sum(sizes)), torch.randn(3, 40)
    whole = pack_linear(library, weight, bias, quantization=quantization)
    joined = pack_linear(library, torch.split(weight, list(sizes)), bias, quantization=quantization)
    assert torch.equal(joined(x), whole(x))


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("size", [16, 21])
def test_gate_and_up_may_come_apart(library: Library, quantization: Quantization, size: int) -> None:
    weight, bias = torch.randn(2 * size, 40).bfloat16(), torch.randn(2 * size)
    whole = pack_linear(library, weight, bias, quantization=quantization, interleave=True)
    apart = pack_linear(library, weight.chunk(2), bias, quantization=quantization, interleave=True)
    assert torch.equal(apart.panels, whole.panels)
    assert apart.bias is not None
    assert whole.bias is not None
    assert torch.equal(apart.bias, whole.bias)
    for pieces in ([size, size - 1], [1] * (2 * size - 1)):
        with pytest.raises(ValueError, match="two, of one size"):
            pack_linear(library, torch.split(weight[1:], pieces), interleave=True)
    with pytest.raises(ValueError, match="two, of one size"):
        pack_linear(library, weight[:1], interleave=True)


@pytest.mark.parametrize("outputs", [1, 31, 48])
def test_a_bias_of_another_size_is_refused(library: Library, outputs: int) -> None:
    with pytest.raises(ValueError, match=rf"a bias \[{outputs}\] for 32 outputs"):
        pack_linear(library, torch.randn(32, 8), torch.randn(outputs))


def test_int8_is_near_what_it_rounds(library: Library) -> None:
    weight, x = torch.randn(200, 800), torch.randn(9, 800)
    packed = pack_linear(library, weight, quantization="int8")
    error = (packed(x) - linear(x, weight)).square().mean() / linear(x, weight).square().mean()
    assert error.sqrt() < 0.02
    assert packed.bytes < 0.3 * weight.nbytes


def test_int8_of_zeros_is_zero(library: Library) -> None:
    packed = pack_linear(library, torch.zeros(20, 40), quantization="int8")
    assert torch.equal(packed(torch.randn(3, 40)), torch.zeros(3, 20))
    assert torch.equal(
        pack_linear(library, torch.randn(20, 40), quantization="int8")(torch.zeros(2, 40)), torch.zeros(2, 20)
    )


FORMATS: list[tuple[torch.dtype, Quantization]] = [
    (torch.float32, "none"),
    (torch.bfloat16, "none"),
    (torch.float32, "int8"),
    (torch.bfloat16, "int4"),
]


@pytest.mark.parametrize(("dtype", "quantization"), FORMATS)
def test_a_row_has_the_same_bits_beside_any_others(
    library: Library, dtype: torch.dtype, quantization: Quantization
) -> None:
    x, weight = torch.randn(70, 1000), torch.randn(150, 1000).to(dtype)
    packed = pack_linear(library, weight, quantization=quantization)
    each = torch.cat([packed(row) for row in torch.split(x, 1)])
    for rows in (2, 3, 4, 7, 8, 13, 16, 30, 35, 70):
        assert torch.equal(packed(x[-rows:]), each[-rows:])


def test_rows_longer_than_a_cache_are_multiplied_too(library: Library) -> None:
    weight, x = torch.randn(16, 263_000) / 512, torch.randn(2, 263_000)
    assert relative_error(pack_linear(library, weight)(x), x.double() @ weight.double().T) < 1e-4


@pytest.mark.parametrize(("dtype", "quantization"), FORMATS)
def test_a_nan_stays_in_its_row(library: Library, dtype: torch.dtype, quantization: Quantization) -> None:
    packed = pack_linear(library, torch.randn(40, 64).to(dtype), quantization=quantization)
    x = torch.randn(20, 64)
    healthy = packed(x)
    x[3, 5] = torch.nan if quantization == "none" else torch.inf
    out = packed(x)
    assert out[3].isnan().all()
    others = [row for row in range(20) if row != 3]
    assert torch.equal(out[others], healthy[others])


@pytest.mark.parametrize(("dtype", "quantization"), FORMATS)
def test_packed_rows_are_read_back_as_rounded(library: Library, dtype: torch.dtype, quantization: Quantization) -> None:
    weight = torch.randn(50, 37).to(dtype)
    packed, index = pack_linear(library, weight, quantization=quantization), torch.tensor([49, 0, 17, 17])
    expected = weight.float()
    if quantization == "int8":
        steps, scales = quantize_weight(weight)
        expected = steps.float() * scales[:, None]
    elif quantization == "int4":
        steps, scales = quantize_int4(weight)
        expected = ((steps.float() - 8) * scales.float().repeat_interleave(32, 1))[:, :37]
    torch.testing.assert_close(packed.rows(index), expected[index], rtol=1e-6, atol=0)
    with pytest.raises(IndexError):
        packed.rows(torch.tensor([50]))


def test_large_weights_outlive_what_they_were_packed_from(library: Library) -> None:
    x, weight = torch.randn(2, 700), torch.randn(1600, 700)  # more than a huge page
    expected, packed = linear(x, weight), [pack_linear(library, weight) for _ in range(3)]
    del weight
    assert all(relative_error(each(x), expected) < 1e-5 for each in packed)


def test_wrong_shapes_are_refused(library: Library) -> None:
    packed = pack_linear(library, torch.randn(8, 16))
    for x in (torch.randn(2, 15), torch.randn(16), torch.randn(2, 16).double()):
        with pytest.raises(ValueError, match=r"expected float32 \[m, 16\]"):
            packed(x)
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        pack_linear(library, torch.randn(8, 16).half())
    with pytest.raises(ValueError, match="of one dtype and width"):
        pack_linear(library, [torch.randn(16, 16), torch.randn(16, 16).bfloat16()])
    with pytest.raises(ValueError, match="of one dtype and width"):
        pack_linear(library, [torch.randn(16, 16), torch.randn(16, 15)])


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_nan_among_weights_shows_in_its_output_alone(
    library: Library, quantization: Quantization, bad: float
) -> None:
    weight, x = torch.randn(40, 64), torch.randn(2, 64)
    healthy = pack_linear(library, weight, quantization=quantization)(x)
    weight[17, 5] = bad
    out = pack_linear(library, weight, quantization=quantization)(x)
    assert out[:, 17].isnan().all()
    others = [column for column in range(40) if column != 17]
    assert torch.equal(out[:, others], healthy[:, others])


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_linears_that_are_packed_side_by_side_are_the_same(library: Library, quantization: Quantization) -> None:
    weights, bias, x = torch.randn(3, 50, 33), torch.randn(50), torch.randn(4, 33)
    for interleave in (False, True):
        apart = [
            pack_linear(library, weight, bias, quantization=quantization, interleave=interleave) for weight in weights
        ]
        together = pack_linears(library, iter(weights), [bias] * 3, quantization=quantization, interleave=interleave)
        assert len({linear.panels.untyped_storage().data_ptr() for linear in together}) == 1
        for one, other in zip(apart, together, strict=True):
            assert torch.equal(one.panels, other.panels)
            assert torch.equal(one(x), other(x))
