"""Random adapters in PEFT's file format."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

ALL_LINEAR = r".*layers\.\d+\.(self_attn|mlp)\.\w+_proj"
"""Module paths of all layers that an adapter can have here."""


def write_adapter(
    directory: Path,
    model: Path,
    *,
    rank: int | Callable[[str], int] = 4,
    modules: str = ALL_LINEAR,
    seed: int = 0,
    size: float = 0.15,
    named: Callable[[str], str] = lambda path: f"base_model.model.{path}",
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Write an adapter for a checkpoint's layers with matching paths; weights are normal, of deviation `size`.

    `rank` may depend on the path; `config` is added to adapter_config.json, whose r is 4 and lora_alpha 8 otherwise.
    """
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for path, (outputs, inputs) in _layers(model, modules).items():
        own = rank if isinstance(rank, int) else rank(path)
        for letter, shape in (("A", (own, inputs)), ("B", (outputs, own))):
            weight = torch.randn(shape, generator=generator) * size
            tensors[f"{named(path)}.lora_{letter}.weight"] = weight.to(dtype)
    save_file(tensors, directory / "adapter_model.safetensors")
    written: Mapping[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank if isinstance(rank, int) else 4,
        "lora_alpha": 8,
        "target_modules": modules,
        "bias": "none",
        **config,
    }
    (directory / "adapter_config.json").write_text(json.dumps(written))
    return directory


def _layers(model: Path, modules: str) -> dict[str, tuple[int, int]]:
    """Return the shapes of a checkpoint's weights with matching paths."""
    shapes: dict[str, tuple[int, int]] = {}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118
                path = name.removesuffix(".weight")
                if re.fullmatch(modules, path):
                    outputs, inputs = stored.get_slice(name).get_shape()
                    shapes[path] = outputs, inputs
    if not shapes:
        raise ValueError(f"{model} has no layer {modules}")
    return shapes
