"""Choice of the kernel of a product with a quantized weight: by shape and rows, from a checked-in table (choices.json).

The table has for each architecture and kind of weight the fewest rows from which each way is taken, for a shape
("outputs x inputs") or all others ("*"). `tools/gpu_check --choices` writes it from a record of the stage `tuning`.
"""

import json
from functools import cache
from importlib import resources
from typing import Literal

import torch

from tercet.kernels.ops.quantized import QuantizedWeight
from tercet.kernels.triton.linear.turned import supports_turned

Way = Literal["weights", "turned", "sums", "rows", "blocks", "integers"]
"""Ways of a product: "weights" widens codes of the weight (`quantized`), "turned" does so as the left operand. The
others round activations: in fp8 with scales applied to float32 sums after the product ("sums"), in the product
("rows"), or in blocks of 128 ("blocks"); and in int8 ("integers")."""

Kind = Literal["fp8", "fp8 block", "int8", "int4"]
WAYS: dict[Kind, tuple[Way, ...]] = {
    "fp8": ("weights", "sums", "rows"),
    "fp8 block": ("weights", "blocks"),
    "int8": ("weights", "integers"),
    "int4": ("weights", "turned"),
}
"""Ways of each kind of weight. The table names no others."""

BLOCK = 128
_UNIT = 16
"""Inputs and outputs of torch's 8-bit products are multiples of this."""

_ROUNDED, _ANY = (torch.bfloat16,), (torch.bfloat16, torch.float16)
"""Dtypes of activations that are rounded to 8 bits, and of those that are not."""

_LEAST_INTEGERS = 17
"""Fewest rows of `torch._int_mm`."""

Table = dict[str, dict[str, dict[str, list[list[int | str]]]]]


def kind_of(weight: QuantizedWeight) -> Kind | None:
    """Return the row of the table for a weight; None if the table has none, or its activations are not rounded."""
    n, k = weight.shape
    if supports_turned(weight):
        return "int4"
    if weight.activations != weight.format or n % _UNIT or k % _UNIT:
        return None
    if weight.block[0] == 1 and weight.block[1] >= k:
        return "fp8" if weight.format == "fp8" else "int8"
    if weight.format == "fp8" and weight.block == (BLOCK, BLOCK) and not (n % BLOCK or k % BLOCK):
        return "fp8 block"
    return None


def way_of(x: torch.Tensor, weight: QuantizedWeight) -> Way:
    """Return the way of a product of x [..., k] with a weight on their device."""
    kind = kind_of(weight)
    if kind is None or x.dtype not in (_ANY if kind == "int4" else _ROUNDED):
        return "weights"
    n, k = weight.shape
    return chosen(architecture(x.device), kind, n, k, x.numel() // k)


def rounds(way: Way) -> bool:
    """Return whether a way rounds activations."""
    return way not in ("weights", "turned")


@cache
def architecture(device: torch.device) -> str:
    """Return the name of a device's architecture in the table."""
    return "sm{}{}".format(*torch.cuda.get_device_capability(device)) if device.type == "cuda" else device.type


def chosen(architecture: str, kind: Kind, n: int, k: int, rows: int) -> Way:
    """Return the way of a product of some rows with a weight [n, k]; "weights" where nothing was measured."""
    steps = _steps(architecture, kind, n, k)
    way: Way = next((way for least, way in reversed(steps) if least <= rows), "weights")
    return "weights" if way == "integers" and rows < _LEAST_INTEGERS else way


@cache
def _steps(architecture: str, kind: Kind, n: int, k: int) -> tuple[tuple[int, Way], ...]:
    shapes = table().get(architecture, {}).get(kind, {})
    found = shapes.get(f"{n} x {k}", shapes.get("*", []))
    return tuple((int(least), _known(kind, way)) for least, way in found)


def _known(kind: Kind, name: int | str) -> Way:
    """Return the way of a name. Raises ValueError for one that such weights do not have."""
    for way in WAYS[kind]:
        if way == name:
            return way
    raise ValueError(f"choices.json: {name!r} is no way of {kind} weights")


@cache
def table() -> Table:
    """Return the checked-in table."""
    content: Table = json.loads(resources.files(__package__).joinpath("choices.json").read_text(encoding="utf-8"))
    return content
