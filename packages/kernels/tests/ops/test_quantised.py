import pytest
import torch

from tercet.kernels.ops.quantised import Format, dequantise, linear_quantised, pack_int4, quantise, unpack_int4


def test_int4_keeps_every_code_in_its_place() -> None:
    codes = torch.randint(0, 16, (3, 96), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    packed = pack_int4(codes)
    assert packed.shape == (3, 48)
    assert packed[0, 17] == codes[0, 33] | codes[0, 49] << 4
    assert torch.equal(unpack_int4(packed), codes)
    with pytest.raises(ValueError, match="no multiple of 32"):
        pack_int4(codes[:, :40])


@pytest.mark.parametrize(("kind", "step"), [("fp8", 2**-4), ("int8", 1 / 254), ("int4", 1 / 14)])
@pytest.mark.parametrize("block", [(1, 32), (16, 64), (100, 1000)])
def test_rounding_is_within_half_a_step(kind: Format, step: float, block: tuple[int, int]) -> None:
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(0))
    quantised = quantise(weight, kind, block)
    assert quantised.shape == (40, 96)
    error = (dequantise(quantised) - weight).abs()
    rows, columns = block
    for row in range(0, 40, rows):
        for column in range(0, 96, columns):
            mine = slice(row, row + rows), slice(column, column + columns)
            assert error[mine].max() <= weight[mine].abs().max() * step * 1.01


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_rows_are_those_of_the_full_weight(kind: Format) -> None:
    weight = quantise(torch.randn(6, 64), kind, (1, 32))
    order = torch.tensor([4, 0, 0, 5])
    assert torch.equal(dequantise(weight.rows(order)), dequantise(weight)[order])
    with pytest.raises(ValueError, match="2 rows share a scale"):
        quantise(torch.randn(6, 64), kind, (2, 32)).rows(order)


def test_the_linear_layer_is_that_of_the_full_weight() -> None:
    weight, x = torch.randn(6, 64), torch.randn(2, 3, 64)
    quantised, bias = quantise(weight, "int8", (1, 64)), torch.randn(6)
    expected = torch.nn.functional.linear(x, dequantise(quantised), bias)
    torch.testing.assert_close(linear_quantised(x, quantised, bias), expected, rtol=1e-5, atol=1e-5)
