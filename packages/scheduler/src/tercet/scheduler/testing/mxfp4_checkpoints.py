"""Random checkpoints of gpt-oss in MXFP4, in the published form, each beside its dequantized weights.

The format of experts is that of the OCP Microscaling Formats specification, in the layout of OpenAI's gpt-oss
(gpt_oss/torch/weights.py). The code is independent of the reader it tests.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]

QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
"""Entry of config.json."""

_NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
_TYPICAL = 2.7
"""Root mean square of the numbers."""


def write_mxfp4(directory: Path, config: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> Path:
    """Write a checkpoint of a config, and in `<directory>-full` the same weights dequantized. Return the latter.

    Weights other than the experts' are in `dtype` in both.
    """
    chance = torch.Generator().manual_seed(0)
    plain = {name: _random(name, shape, chance).to(dtype) for name, shape in _shapes(config).items()}
    stored = dict(plain)
    hidden, size, experts = (config[name] for name in ("hidden_size", "intermediate_size", "num_local_experts"))
    for layer in range(config["num_hidden_layers"]):
        for part, outputs, inputs in (("gate_up_proj", 2 * size, hidden), ("down_proj", hidden, size)):
            name = f"model.layers.{layer}.mlp.experts.{part}"
            blocks, scales, weight = _mxfp4(experts, outputs, inputs, chance)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            plain[name] = weight.transpose(1, 2).to(dtype)
    other = directory.with_name(directory.name + "-full")
    _write(directory, stored, {**config, "quantization_config": QUANTIZATION})
    _write(other, plain, config)
    return other


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor but the experts' weights."""
    hidden, size, experts = (config[name] for name in ("hidden_size", "intermediate_size", "num_local_experts"))
    heads, head_dim = config["num_attention_heads"], config["head_dim"]
    queries, keys = heads * head_dim, config["num_key_value_heads"] * head_dim
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "lm_head.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        parts: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.sinks": (heads,),
            "mlp.experts.gate_up_proj_bias": (experts, 2 * size),
            "mlp.experts.down_proj_bias": (experts, hidden),
        }
        linears = {
            f"self_attn.{name}_proj": (rows, hidden) for name, rows in zip("qkv", (queries, keys, keys), strict=True)
        }
        linears |= {"self_attn.o_proj": (hidden, queries), "mlp.router": (experts, hidden)}
        for name, shape in linears.items():
            parts |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    return found


def _random(name: str, shape: tuple[int, ...], chance: torch.Generator) -> torch.Tensor:
    """Return random norms about 1, and weights of a size that keeps a model of any width well-behaved."""
    if "norm" in name:
        return torch.rand(shape, generator=chance) + 0.5
    values = torch.randn(shape, generator=chance)
    if len(shape) == 1 or name.endswith("bias") or "embed" in name:
        return values
    return values / math.sqrt(shape[-1])


def _mxfp4(experts: int, n: int, k: int, chance: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Return (blocks uint8 [experts, n, k / 32, 16], scales uint8 [experts, n, k / 32], float32 [experts, n, k])."""
    codes = torch.randint(0, 16, (experts, n, k // 32, 32), generator=chance)
    power = round(math.log2(1 / math.sqrt(k) / _TYPICAL))
    powers = torch.randint(power - 2, power + 2, (experts, n, k // 32), generator=chance)
    weight = torch.tensor(_NUMBERS)[codes] * (2.0**powers)[..., None]
    blocks = codes[..., 0::2] + 16 * codes[..., 1::2]
    return blocks.to(torch.uint8), (powers + 127).to(torch.uint8), weight.view(experts, n, k)


def _write(directory: Path, tensors: Tensors, config: Mapping[str, Any]) -> None:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
