"""Ways of products with quantized weights: each checked and timed, and the table of choice that follows.

A way includes the rounding of activations and the scaling of sums. One that is refused or wrong has words for a time.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from tercet.kernels.device import has_failed
from tercet.kernels.ops.quantized import EightBits, Format, QuantizedWeight, dequantize
from tercet.kernels.ops.rounded import linear_rounded, round_rows
from tercet.kernels.tools.bench import measure_recorded
from tercet.kernels.triton.linear.choices import BLOCK, WAYS, Kind, Way, architecture, kind_of, rounds
from tercet.kernels.triton.linear.eight_bits import rounding_of
from tercet.kernels.triton.linear.quantized import multiply
from tools.gpu_stages.scale import Results, Scale
from tools.gpu_stages.torch_kernels import copies, layer_sizes, random_weight

_BUDGET = 0.02
_ALLOWED = 0.01
"""Allowed RMS error as a share of the result: sums and results in 16 bits."""

_COMPARED = 64
"""Rows that are compared with the definition."""

_FORMATS: dict[Kind, Format] = {"fp8": "fp8", "fp8 block": "fp8", "int8": "int8", "int4": "int4"}
_BLOCKS = {"fp8 block": (BLOCK, BLOCK), "int4": (1, BLOCK)}
_ROUNDED: dict[Format, EightBits] = {"fp8": "fp8", "int8": "int8"}


def time_ways(scale: Scale, _: str) -> Iterator[Results]:
    """Yield the architecture, and for each kind of weight and shape, by rows, the microseconds of each way."""
    yield {"architecture": architecture(scale.device)}
    for kind in WAYS:
        found: dict[str, dict[str, dict[str, float | str]]] = {}
        for n, k in dict.fromkeys(layer_sizes(scale)):
            with torch.inference_mode():
                found[f"{n} x {k}"] = dict(_by_rows(scale, kind, n, k))
            yield {kind: found}


def _by_rows(scale: Scale, kind: Kind, n: int, k: int) -> Iterator[tuple[str, dict[str, float | str]]]:
    form, block = _FORMATS[kind], _BLOCKS.get(kind, (1, k))
    made = [random_weight(form, block, n, k, scale) for _ in copies(scale, n * k * (0.5 if form == "int4" else 1))]
    weights = [replace(weight, activations=_ROUNDED.get(form)) for weight in made]
    if kind_of(weights[0]) != kind:
        return  # a shape that such kernels do not take
    for rows in scale.way_rows:
        x = torch.randn(rows, k, device=scale.device).to(scale.dtype)
        yield str(rows), {way: _time(scale, way, x, weights) for way in WAYS[kind]}


def _time(scale: Scale, way: Way, x: torch.Tensor, weights: list[QuantizedWeight]) -> float | str:
    """Return the microseconds of a product, or why there are none. Raises if the device fails."""

    def run() -> None:
        for weight in weights:
            multiply(x, weight, None, way)

    try:
        if trouble := _trouble(way, x, weights[0]):
            return trouble
        return measure_recorded(run, scale.device, 1, _BUDGET) / len(weights) * 1e6
    except (RuntimeError, ValueError) as error:
        if has_failed(error):
            raise
        return f"refused: {str(error).partition(chr(10))[0][:160]}"


def _trouble(way: Way, x: torch.Tensor, weight: QuantizedWeight) -> str:
    """Return how far a way is from the definition of its first rows, if too far."""
    actual, few = multiply(x, weight, None, way)[:_COMPARED].float(), x[:_COMPARED]
    if not rounds(way):
        expected = few.float() @ dequantize(weight).T
    else:
        expected = linear_rounded(round_rows(few, *rounding_of(weight, way)), weight, None, torch.float32)
    far = float((actual - expected).square().mean().sqrt() / expected.square().mean().sqrt())
    return "" if far <= _ALLOWED else f"wrong: {far:.2g} of the result"


def choices_of(results: Mapping[str, Any]) -> dict[str, dict[str, dict[str, list[list[int | str]]]]]:
    """Return the table of an architecture from the record of `tuning`: the rows from which a way is the fastest."""
    ways = results["ways"]
    kinds: dict[str, dict[str, list[list[int | str]]]] = {
        kind: {shape: _steps(by_rows) for shape, by_rows in ways[kind].items()} for kind in WAYS if kind in ways
    }
    return {ways["architecture"]: kinds}


def _steps(by_rows: Mapping[str, Mapping[str, float | str]]) -> list[list[int | str]]:
    """Return [rows, way] wherever another way becomes the fastest; with a single row weights are widened."""
    steps: list[list[int | str]] = [[1, "weights"]]
    for rows in sorted(by_rows, key=int):
        times = {way: time for way, time in by_rows[rows].items() if isinstance(time, float)}
        best = min(times, key=lambda way: times[way], default="weights")
        if best != steps[-1][1]:
            steps.append([int(rows), best])
    return steps
