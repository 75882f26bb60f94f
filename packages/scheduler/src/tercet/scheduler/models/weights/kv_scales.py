"""A checkpoint's calibrated scales of keys and values, for an 8-bit KV cache."""

import math
from collections.abc import Mapping
from pathlib import Path

import torch

from tercet.scheduler.model_files import ModelError, read_header, weight_files
from tercet.scheduler.models.weights.checkpoint_names import text_names
from tercet.scheduler.models.weights.tensor_files import open_tensors

Scales = tuple[float, float]
"""Scales of keys and of values in a layer whose cache has 8 bits."""


_NAMES = (
    ("k_scale", "v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("kv_scale", "kv_scale"),
)
"""Names that different tools give to the scales of keys and values, after the name of a layer's attention."""
SUFFIXES = tuple(f".self_attn.{name}" for names in _NAMES for name in dict.fromkeys(names))
"""Suffixes of all their names."""


def read_kv_scales(directory: Path, layers: int) -> Mapping[int, Scales]:
    """Read the scales of each layer that has any. Raise ModelError for a scale that is not a positive number."""
    headers = {path: read_header(path) for path in weight_files(directory)}
    here = text_names([name for header in headers.values() for name in header])
    stored = {here[name]: (path, name) for path, header in headers.items() for name in header if name in here}
    place = {name: where for name, where in stored.items() if name.endswith(SUFFIXES)}
    found: dict[int, Scales] = {}
    for layer in range(layers):
        for keys, values in _NAMES:
            names = [f"model.layers.{layer}.self_attn.{name}" for name in (keys, values)]
            if all(name in place for name in names):
                found[layer] = _number(*place[names[0]]), _number(*place[names[1]])
                break
    if place and not found:
        raise ModelError(f"{directory}: {min(place)} belongs to no layer, or has no other half")
    return found


def _number(path: Path, name: str) -> float:
    with open_tensors(path) as file:
        scale: torch.Tensor = file.get_tensor(name).float()
    if scale.numel() != 1:
        raise ModelError(f"{path}: {name} {list(scale.shape)}: only one scale for a layer is supported")
    value = scale.item()
    if not 0 < value < math.inf:
        raise ModelError(f"{path}: {name} is {value}, which is no scale")
    return float(value)
