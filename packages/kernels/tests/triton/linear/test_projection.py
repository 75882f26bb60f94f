"""The linear layers of a model against their references: one row by kernels that do all at once, and several."""

from collections.abc import Callable
from typing import get_args

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are Triton's")

from packages.kernels.tests.pairwise import pairwise
from tercet.kernels.ops import projection as reference
from tercet.kernels.ops.activation import Gate
from tercet.kernels.ops.projection import Norm, Weight
from tercet.kernels.ops.quantized import Format, quantize
from tercet.kernels.triton.linear import projection

GATES = [None, *get_args(Gate)]
KINDS = ["full", *get_args(Format)]
MakeWeight = Callable[[int, int], Weight]


def made(device: torch.device, *shape: int) -> torch.Tensor:
    """In float16: what the interpreter computes as a GPU does."""
    return torch.randn(shape, device=device).to(torch.float16)


@pytest.fixture(params=KINDS)
def weight_of(request: pytest.FixtureRequest, device: torch.device) -> MakeWeight:
    """Makes weights [outputs, size] in full, or in few bits."""

    def make(outputs: int, size: int) -> Weight:
        full = torch.randn(outputs, size, device=device) / size**0.5
        return full.half() if request.param == "full" else quantize(full, request.param, (1, 64))

    return make


@pytest.mark.parametrize(
    ("rows", "size", "outputs", "biased"), pairwise([1, 3], [512, 4096 + 512, 320], [74, 2], [True, False])
)
def test_gated_or_not(
    device: torch.device, weight_of: MakeWeight, rows: int, size: int, outputs: int, biased: bool
) -> None:
    x, weight = made(device, rows, size), weight_of(outputs, size)
    bias = made(device, outputs) if biased else None
    for gate in GATES:
        actual = projection.project(x, weight, bias, gate=gate)
        torch.testing.assert_close(actual, reference.project(x, weight, bias, gate=gate), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize(("rows", "size", "summed", "gate"), pairwise([1, 3], [512, 2048 + 512], [False, True], GATES))
def test_of_a_norm(
    device: torch.device, weight_of: MakeWeight, rows: int, size: int, summed: bool, gate: Gate | None
) -> None:
    x, weight, bias = made(device, rows, size) * 7, weight_of(74, size), made(device, 74)
    residual = made(device, rows, size) if summed else None
    norm = Norm(made(device, size), 0.3)
    actual = projection.project_normed(x, residual, norm, weight, bias, gate=gate)
    expected = reference.project_normed(x, residual, norm, weight, bias, gate=gate)
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("rows", [1, 3])
def test_onto_a_residual(device: torch.device, weight_of: MakeWeight, rows: int) -> None:
    x, residual, weight, bias = made(device, rows, 768), made(device, rows, 37), weight_of(37, 768), made(device, 37)
    out, left = projection.project_onto(x, residual, weight, bias)
    expected, added = reference.project_onto(x, residual, weight, bias)
    assert added is residual
    torch.testing.assert_close(out if left is None else out + left, expected + added, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("weight_of", [kind for kind in KINDS if kind != "mxfp4"], indirect=True)
def test_one_row_adds_the_residual_at_once(device: torch.device, weight_of: MakeWeight) -> None:
    x, weight = made(device, 1, 512), weight_of(512, 512)
    total, left = projection.project_onto(x, x, weight)
    assert left is None
    assert projection.project_normed(total, left, Norm(x[0], 0.1), weight)[1] is total


def test_sums_are_rounded_as_those_of_torch(device: torch.device) -> None:
    """What a layer gives is rounded before it is added, whoever adds it."""
    x, weight = torch.ones(1, 256, device=device).half(), torch.zeros(1, 256, device=device).half()
    weight[0, :2] = torch.tensor([1.0, 2**-11])
    residual = torch.tensor([[2**-11]], device=device).half()
    assert projection.project_onto(x, residual, weight)[0].item() == 1
    assert projection.project(x, weight).item() == 1
