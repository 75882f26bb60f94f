from dataclasses import replace

import pytest
import torch

from tercet.kernels.ops.quantized import (
    Format,
    QuantizedWeight,
    concat_rows,
    dequantize,
    linear_quantized,
    pack_int4,
    quantize,
    unpack_int4,
)


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
    quantised = quantize(weight, kind, block)
    assert quantised.shape == (40, 96)
    error = (dequantize(quantised) - weight).abs()
    rows, columns = block
    for row in range(0, 40, rows):
        for column in range(0, 96, columns):
            mine = slice(row, row + rows), slice(column, column + columns)
            assert error[mine].max() <= weight[mine].abs().max() * step * 1.01


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_rows_are_those_of_the_full_weight(kind: Format) -> None:
    weight = quantize(torch.randn(6, 64), kind, (1, 32))
    order = torch.tensor([4, 0, 0, 5])
    assert torch.equal(dequantize(weight.rows(order)), dequantize(weight)[order])
    with pytest.raises(ValueError, match="2 rows share a scale"):
        quantize(torch.randn(6, 64), kind, (2, 32)).rows(order)


@pytest.mark.parametrize(
    ("kind", "width", "columns"),
    [
        ("fp8", 32, range(32, 96)),
        ("fp8", 20, range(80, 96)),
        ("fp8", 1000, range(7, 30)),
        ("int8", 16, range(96)),
        ("int4", 32, range(32, 64)),
        ("int4", 96, range(64, 96)),
        ("mxfp4", 32, range(32, 96)),
    ],
)
def test_a_part_equals_that_part_of_the_full_weight(kind: Format, width: int, columns: range) -> None:
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(0))
    whole = quantize(weight, kind, (1, width))
    part = whole.part(range(3, 17), columns)
    assert part.shape == (14, len(columns))
    assert torch.equal(dequantize(part), dequantize(whole)[3:17, columns.start : columns.stop])


@pytest.mark.parametrize(
    ("kind", "block", "columns", "message"),
    [
        ("fp8", (1, 32), range(16, 96), "columns 16 to 96 are not whole units of 32"),
        ("int4", (1, 96), range(16), "columns 0 to 16 are not whole units of 32"),
        ("fp8", (2, 32), range(96), "2 rows share a scale"),
    ],
)
def test_parts_that_cut_a_block_are_refused(kind: Format, block: tuple[int, int], columns: range, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize(torch.ones(40, 96), kind, block).part(range(8), columns)


@pytest.mark.parametrize("power", [-127, -126, -20, 0, 3, 120])
def test_codes_of_mxfp4_stand_for_these_numbers(power: int) -> None:
    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
    codes = pack_int4(torch.arange(32, dtype=torch.uint8)[None] % 16)
    scales = torch.tensor([[power + 127]], dtype=torch.uint8)
    weight = QuantizedWeight(format="mxfp4", codes=codes, scales=scales, zeros=None, block=(1, 32))
    assert dequantize(weight)[0].tolist() == [number * 2.0**power for number in numbers * 2]


def test_rounding_to_mxfp4_is_to_the_nearest_and_saturates() -> None:
    weight = torch.tensor([0.2, 0.3, 0.8, 1.2, 1.3, 1.7, 2.4, 2.6, 3.4, 3.6, 4.9, 5.1, 7.9, -7.9, -2.4, 0.0]) * 2**-9
    expected = [0.0, 0.5, 1.0, 1.0, 1.5, 1.5, 2.0, 3.0, 3.0, 4.0, 4.0, 6.0, 6.0, -6.0, -2.0, 0.0]
    rounded = dequantize(quantize(torch.cat([weight, torch.zeros(48)])[None], "mxfp4", (1, 32)))
    assert (rounded[0] * 2**9).tolist() == expected + [0.0] * 48


def test_the_linear_layer_is_that_of_the_full_weight() -> None:
    weight, x = torch.randn(6, 64), torch.randn(2, 3, 64)
    quantised, bias = quantize(weight, "int8", (1, 64)), torch.randn(6)
    expected = torch.nn.functional.linear(x, dequantize(quantised), bias)
    torch.testing.assert_close(linear_quantized(x, quantised, bias), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "bytes_of_a_weight"), [("fp8", 1 + 4 / 32), ("int8", 1 + 4 / 32), ("int4", 0.5 + 8 / 32)]
)
def test_size_in_bytes_counts_codes_scales_and_zeros(kind: Format, bytes_of_a_weight: float) -> None:
    assert quantize(torch.randn(6, 64), kind, (1, 32)).nbytes == 6 * 64 * bytes_of_a_weight


@pytest.mark.parametrize(("kind", "width"), [("int4", 16), ("int4", 32), ("int8", 16)])
def test_minimums_are_added_to_each_block(kind: Format, width: int) -> None:
    weight = quantize(torch.randn(6, 64), kind, (1, width))
    minimums = torch.randn(6, 64 // width)
    raised = replace(weight, minimums=minimums)
    expected = dequantize(weight) + minimums.repeat_interleave(width, 1)
    assert torch.equal(dequantize(raised), expected)
    assert torch.equal(dequantize(raised.rows(torch.tensor([3, 1]))), expected[[3, 1]])
    assert torch.equal(dequantize(raised.part(range(2, 5), range(32, 64))), expected[2:5, 32:])
    assert torch.equal(dequantize(raised.to(torch.device("cpu"))), expected)
    assert raised.nbytes == weight.nbytes + minimums.nbytes
    assert torch.equal(dequantize(concat_rows([weight, raised])), torch.cat([dequantize(weight), expected]))
