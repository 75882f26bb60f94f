"""The choice between ways of a product with an 8-bit weight, and each way against the definition."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="these are Triton's kernels")

from tercet.kernels.ops import projection as reference_projection
from tercet.kernels.ops import rounded as reference
from tercet.kernels.ops.projection import Norm
from tercet.kernels.ops.quantized import Format, QuantizedWeight, dequantize, quantize
from tercet.kernels.triton.linear import choices, projection, quantized
from tercet.kernels.triton.linear.choices import WAYS, Kind, Table, Way, chosen, kind_of, table, way_of
from tercet.kernels.triton.linear.eight_bits import linear_rounded, rounding_of
from tercet.kernels.triton.linear.rounding import round_rows

TABLE: Table = {
    "sm90": {"fp8": {"*": [[1, "weights"], [4, "sums"], [64, "rows"]], "32 x 64": [[2, "rows"]]}},
    "cpu": {
        "fp8": {"*": [[4, "sums"], [64, "rows"]]},
        "fp8 block": {"*": [[4, "blocks"]]},
        "int8": {"*": [[4, "integers"]]},
    },
}


@pytest.fixture
def _table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(choices, "table", lambda: TABLE)
    choices._steps.cache_clear()
    yield
    choices._steps.cache_clear()


def weight_of(kind: Format, n: int = 64, k: int = 128, block: tuple[int, int] = (1, 1 << 30)) -> QuantizedWeight:
    torch.manual_seed(0)
    made = quantize(torch.randn(n, k) / k**0.5, kind, block)
    return replace(made, activations=kind if kind in ("fp8", "int8") else None)


def test_the_checked_in_table_names_known_ways_in_order() -> None:
    assert table().keys() == {"sm90"}
    for kinds in table().values():
        for kind, shapes in kinds.items():
            for steps in shapes.values():
                assert [least for least, _ in steps] == sorted({least for least, _ in steps})
                assert {way for _, way in steps} <= set(WAYS[kind])  # type: ignore[index]


@pytest.mark.parametrize(
    ("rows", "way"), [(1, "weights"), (31, "weights"), (32, "sums"), (511, "sums"), (512, "rows"), (8192, "rows")]
)
def test_an_h100_takes_what_was_fastest_there(rows: int, way: str) -> None:
    assert chosen("sm90", "fp8", 4096, 14336, rows) == way


def test_other_gpus_widen_weights() -> None:
    assert [chosen("sm90", "int4", 64, 64, rows) for rows in (64, 65, 128, 129)] == [
        *("weights", "turned", "turned", "weights")
    ]
    for kind in WAYS:
        assert {chosen(architecture, kind, 64, 64, 300) for architecture in ("sm80", "sm100", "cpu")} == {"weights"}


@pytest.mark.usefixtures("_table")
def test_a_shape_has_a_choice_of_its_own() -> None:
    assert [chosen("sm90", "fp8", 32, 64, rows) for rows in (1, 2, 100)] == ["weights", "rows", "rows"]
    assert [chosen("sm90", "fp8", 64, 64, rows) for rows in (1, 4, 100)] == ["weights", "sums", "rows"]
    assert [chosen("cpu", "int8", 64, 64, rows) for rows in (16, 17)] == ["weights", "integers"]


def test_a_way_that_such_weights_do_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "table", lambda: {"sm90": {"int8": {"*": [[1, "rows"]]}}})
    choices._steps.cache_clear()
    with pytest.raises(ValueError, match="'rows' is no way of int8 weights"):
        chosen("sm90", "int8", 64, 64, 300)
    choices._steps.cache_clear()


@pytest.mark.parametrize(
    ("weight", "kind"),
    [
        (weight_of("fp8"), "fp8"),
        (weight_of("int8"), "int8"),
        (weight_of("fp8", 128, 256, (128, 128)), "fp8 block"),
        (weight_of("fp8", 64, 256, (64, 128)), None),
        (weight_of("fp8", 64, 256, (1, 128)), None),
        (weight_of("fp8", 40), None),
        (weight_of("int4", 64, 128, (1, 32)), "int4"),
        (weight_of("mxfp4", 64, 128), None),
        (replace(weight_of("fp8"), activations=None), None),
    ],
)
def test_weights_whose_activations_are_rounded(weight: QuantizedWeight, kind: Kind | None) -> None:
    assert kind_of(weight) == kind


@pytest.mark.usefixtures("_table")
def test_activations_in_16_bits_of_another_kind_are_not_rounded() -> None:
    weight = weight_of("fp8")
    assert way_of(torch.empty(8, 128, dtype=torch.bfloat16), weight) == "sums"
    assert way_of(torch.empty(8, 128, dtype=torch.float16), weight) == "weights"


def has_scaled_products() -> bool:
    one = torch.ones((), dtype=torch.float32)
    codes = torch.zeros(16, 16).to(torch.float8_e4m3fn)
    try:
        torch._scaled_mm(
            codes, codes.t(), one.expand(16, 1).clone(), one.expand(1, 16).clone(), out_dtype=torch.bfloat16
        )
    except (RuntimeError, NotImplementedError):
        return False
    return True


WAYS_HERE: list[tuple[Format, Way]] = [("fp8", "sums"), ("fp8", "rows"), ("int8", "integers")]
"""Ways that a CPU can multiply; it has no products of blocks."""


@pytest.mark.parametrize(("kind", "way"), WAYS_HERE)
@pytest.mark.parametrize("rows", [17, 40])
def test_each_way_equals_the_definition(kind: Format, way: Way, rows: int) -> None:
    if kind == "fp8" and not has_scaled_products():
        pytest.skip("this torch has no products in fp8 on a CPU")
    weight, bias = weight_of(kind), torch.randn(64).bfloat16()
    x = torch.randn(rows, 128).bfloat16()
    rounded = reference.round_rows(x, *rounding_of(weight, way))
    for given in (None, bias):
        actual = linear_rounded(rounded, weight, given, way, torch.bfloat16)
        expected = reference.linear_rounded(rounded, weight, given, torch.float32)
        torch.testing.assert_close(actual.float(), expected, rtol=0.01, atol=0.01)


@pytest.mark.usefixtures("_table")
@pytest.mark.parametrize(("kind", "rows", "way"), [("fp8", 8, "sums"), ("fp8", 70, "rows"), ("int8", 40, "integers")])
def test_layers_take_the_chosen_way(kind: Format, rows: int, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """The product is the definition's, since an interpreter rounds bfloat16 in its own way."""
    taken = list[str]()

    def product(
        rounded: reference.RoundedRows, weight: QuantizedWeight, bias: torch.Tensor | None, way: Way, dtype: torch.dtype
    ) -> torch.Tensor:
        taken.append(way)
        return reference.linear_rounded(rounded, weight, bias, dtype)

    monkeypatch.setattr(quantized, "linear_rounded", product)
    monkeypatch.setattr(projection, "linear_rounded", product)
    weight, x = weight_of(kind, 64, 128), torch.randn(rows, 128).bfloat16()
    norm = Norm(torch.rand(128).bfloat16(), 1e-5)
    out = projection.project(x, weight)
    again, total = projection.project_normed(x, x, norm, weight, gate="silu")
    projection.project_onto(x, x, weight)
    assert taken == [way] * 3
    assert (out.shape, again.shape, total.shape) == ((rows, 64), (rows, 32), (rows, 128))
    full = x.float() @ dequantize(weight).T
    assert ((out.float() - full).square().mean() / full.square().mean()).sqrt() < 0.06


@pytest.mark.usefixtures("_table")
def test_weights_in_4_bits_are_turned_and_their_activations_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of float16, in which most such checkpoints are."""
    monkeypatch.setitem(TABLE["cpu"], "int4", {"*": [[4, "turned"]]})
    weight, x = weight_of("int4", 64, 128, (1, 32)), torch.randn(20, 128).half()
    norm = Norm(torch.rand(128).half(), 1e-5)
    assert way_of(x, weight) == "turned"
    assert way_of(x.float(), weight) == "weights"
    out, total = projection.project_normed(x, x, norm, weight)
    expected, _ = reference_projection.project_normed(x, x, norm, weight)
    torch.testing.assert_close(out, expected, rtol=4e-3, atol=4e-3)
    assert torch.equal(total, x + x)


def test_blocks_have_scales_as_torch_reads_them() -> None:
    """Of activations, those of one block of columns are adjacent; of weights, too."""
    weight = weight_of("fp8", 256, 512, (128, 128))
    assert rounding_of(weight, "blocks") == ("fp8", 128)
    rounded = round_rows(torch.randn(8, 512).half(), "fp8", 128)
    assert rounded.scales.shape == (8, 4)
    assert rounded.scales.stride() == (1, 8)
    assert weight.scales.t().shape == (4, 2)
    assert weight.scales.t().stride() == (1, 4)
