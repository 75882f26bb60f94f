"""Quantized checkpoints of random weights, as the public tools write them, each beside its dequantized weights.

The layouts are those of AutoAWQ (awq/modules/linear/gemm.py), AutoGPTQ (qlinear_cuda_old.py), compressed-tensors'
float-quantized, pack-quantized and nvfp4-pack-quantized formats (compressors/), ModelOpt's NVFP4
(torch/quantization/qtensor/nvfp4_tensor.py), and DeepSeek-V3's fp8 checkpoints (inference/kernel.py, weight_dequant).
The code is independent of the readers it tests. Weights are of a size that keeps a model of any width well-behaved.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
_Stored = tuple[Tensors, torch.Tensor]
"""Stored tensors of a linear layer, and its weight as float32 [n, k]."""

KINDS = (
    "awq",
    "gptq",
    "gptq row",
    "packed",
    "packed zeros",
    "channel",
    "tensor",
    "deepseek",
    "int8",
    "nvfp4",
    "modelopt",
)
"""Formats. `gptq row` has one group for a whole row and unpacked zeros; three are fp8 with different scale blocks.
`packed` is compressed-tensors' int4, with or without zero points. `tensor`, `deepseek` and `int8` are made for
activations in 8 bits. `nvfp4` is compressed-tensors', `modelopt` is ModelOpt's.
"""

_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass(frozen=True)
class Grain:
    """Shape of the weights that share a scale."""

    group: int = 128
    """Columns of a group, in four-bit integers."""
    block: tuple[int, int] = (128, 128)
    """Rows and columns of a block, in deepseek."""


PUBLIC_GRAIN = Grain()
"""Grain of nearly every public checkpoint."""


def quantization_config(kind: str, grain: Grain) -> dict[str, Any]:
    """Return the quantization_config of a format."""
    match kind:
        case "awq":
            return {"quant_method": "awq", "bits": 4, "group_size": grain.group, "zero_point": True, "version": "gemm"}
        case "gptq":
            return {"quant_method": "gptq", "bits": 4, "group_size": grain.group, "desc_act": False, "sym": False}
        case "gptq row":
            return {"quant_method": "gptq", "bits": 4, "group_size": -1, "checkpoint_format": "gptq_v2"}
        case "packed" | "packed zeros":
            four = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": grain.group}
            groups = {"group_0": {"weights": {**four, "symmetric": kind == "packed"}}}
            return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
        case "channel" | "tensor" | "int8":
            eight = {"num_bits": 8, "type": "int" if kind == "int8" else "float"}
            group = {"weights": {**eight, "strategy": "tensor" if kind == "tensor" else "channel"}}
            if kind != "channel":
                group["input_activations"] = {**eight, "strategy": "token", "dynamic": True}
            return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
        case "deepseek":
            return {"quant_method": "fp8", "weight_block_size": [*grain.block]}
        case "nvfp4":
            of_codes = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
            groups = {
                "group_0": {"weights": of_codes, "input_activations": dict[str, object](of_codes, dynamic="local")}
            }
            form = {"format": "nvfp4-pack-quantized", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
            return {"quant_method": "compressed-tensors", **form, "config_groups": groups}
        case "modelopt":
            return {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "kv_cache_quant_algo": "FP8",
                "ignore": ["lm_head"],
            }
    raise ValueError(f"{kind!r} is not one of {', '.join(KINDS)}")


def _linears(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of each linear layer in a layer of Llama, Mixtral, Phi-3, GLM-4.5 or DeepSeek-V3."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    queries, keys = heads * head_dim, config["num_key_value_heads"] * head_dim
    found = {f"self_attn.{name}_proj": (size, hidden) for name, size in (("q", queries), ("k", keys), ("v", keys))}
    found["self_attn.o_proj"] = (hidden, queries)
    up, down = (inner, hidden), (hidden, inner)
    if config["architectures"] == ["DeepseekV3ForCausalLM"]:
        found = _latent_linears(config)
    if config["architectures"] == ["Phi3ForCausalLM"]:
        fused = {"self_attn.qkv_proj": (queries + 2 * keys, hidden), "mlp.gate_up_proj": (2 * inner, hidden)}
        return {**fused, "self_attn.o_proj": (hidden, queries), "mlp.down_proj": down}
    if config.get("n_routed_experts"):
        inner = config["moe_intermediate_size"]
        words = [f"experts.{expert}" for expert in range(config["n_routed_experts"])]
        sizes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        found["mlp.gate"] = (len(words), hidden)
        return found | {f"mlp.{word}.{name}": sizes[name] for word in [*words, "shared_experts"] for name in sizes}
    experts = config.get("num_local_experts", 0)
    if not experts:
        return found | {"mlp.gate_proj": up, "mlp.up_proj": up, "mlp.down_proj": down}
    found["block_sparse_moe.gate"] = (experts, hidden)
    for expert in range(experts):
        parts = {"w1": up, "w2": down, "w3": up}
        found |= {f"block_sparse_moe.experts.{expert}.{part}": size for part, size in parts.items()}
    return found


def _latent_linears(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of the linear layers of latent attention."""
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    still, turned, value = (config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    first = config["q_lora_rank"]
    sizes = {
        "q_a_proj": (first, hidden),
        "q_b_proj": (heads * (still + turned), first),
        "kv_a_proj_with_mqa": (rank + turned, hidden),
        "kv_b_proj": (heads * (still + value), rank),
        "o_proj": (hidden, heads * value),
    }
    return {f"self_attn.{name}": size for name, size in sizes.items()}


def write_checkpoint(
    kind: str,
    directory: Path,
    config: Mapping[str, Any],
    grain: Grain,
    *,
    full: tuple[str, ...] = (),
    beside: Tensors | None = None,
) -> Path:
    """Write a checkpoint of a format, and in `<directory>-full` the same weights dequantized. Return the latter.

    Linear layers named in `full` are stored dequantized in both. Both get the tensors `beside`.
    """
    chance = torch.Generator().manual_seed(0)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    plain = {
        "model.embed_tokens.weight": torch.randn(vocab, hidden, generator=chance),
        "lm_head.weight": torch.randn(vocab, hidden, generator=chance) * _narrow(hidden),
        "model.norm.weight": torch.rand(hidden, generator=chance),
        **(beside or {}),
    }
    stored = dict(plain)
    for layer in range(config["num_hidden_layers"]):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            name = f"model.layers.{layer}.{norm}.weight"
            stored[name] = plain[name] = torch.rand(hidden, generator=chance)
        for part, (n, k) in _linears(config).items():
            name = f"model.layers.{layer}.{part}"
            tensors, weight = _linear(kind, name, n, k, grain, chance)
            plain[f"{name}.weight"] = weight
            stored |= {f"{name}.weight": weight} if part in full else tensors
    other = directory.with_name(directory.name + "-full")
    _write(directory, stored, {**config, "quantization_config": quantization_config(kind, grain)})
    _write(other, plain, config)
    return other


def _write(directory: Path, tensors: Tensors, config: Mapping[str, Any]) -> None:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")


def _linear(kind: str, name: str, n: int, k: int, grain: Grain, chance: torch.Generator) -> _Stored:
    match kind:
        case "awq":
            return _awq(name, n, k, grain.group, chance)
        case "gptq":
            return _gptq(name, n, k, grain.group, 1, chance)
        case "gptq row":
            return _gptq(name, n, k, k, 0, chance)
        case "packed" | "packed zeros":
            return _packed(name, n, k, grain.group, chance, zeros=kind == "packed zeros")
        case "channel":
            return _fp8(f"{name}.weight", "_scale", (n, k), (n, 1), (1, k), chance)
        case "tensor":
            return _fp8(f"{name}.weight", "_scale", (n, k), (1,), (n, k), chance)
        case "int8":
            codes = torch.randint(-127, 128, (n, k), generator=chance, dtype=torch.int8)
            scale = (torch.rand(n, 1, generator=chance) / 500 + 0.001) * _narrow(k)
            return {f"{name}.weight": codes, f"{name}.weight_scale": scale}, codes.float() * scale
        case "deepseek":
            rows, columns = grain.block
            return _fp8(f"{name}.weight", "_scale_inv", (n, k), (-(-n // rows), -(-k // columns)), grain.block, chance)
        case "nvfp4" | "modelopt":
            return _nvfp4(name, n, k, chance, global_divides=kind == "nvfp4")
    raise ValueError(f"{kind!r} is not one of {', '.join(KINDS)}")


def _awq(name: str, n: int, k: int, group: int, chance: torch.Generator) -> _Stored:
    codes, zeros, scales, weight = _codes(n, k, k // group, chance)
    qweight = _words(codes.T.reshape(k, n // 8, 8)[..., _AWQ_ORDER])
    qzeros = _words(zeros.T.reshape(-1, n // 8, 8)[..., _AWQ_ORDER])
    return {f"{name}.qweight": qweight, f"{name}.qzeros": qzeros, f"{name}.scales": scales.T.contiguous()}, weight


def _gptq(name: str, n: int, k: int, group: int, first_zero: int, chance: torch.Generator) -> _Stored:
    codes, zeros, scales, weight = _codes(n, k, k // group, chance)
    tensors = {
        f"{name}.qweight": _words(codes.T.reshape(k // 8, 8, n).transpose(1, 2)),
        f"{name}.qzeros": _words(((zeros - first_zero) & 15).T.reshape(-1, n // 8, 8)),
        f"{name}.scales": scales.T.contiguous(),
        f"{name}.g_idx": torch.arange(k, dtype=torch.int32) // group,
    }
    return tensors, weight


def _packed(name: str, n: int, k: int, group: int, chance: torch.Generator, *, zeros: bool) -> _Stored:
    codes, zero_points, scales, weight = _codes(n, k, k // group, chance)
    tensors = {
        f"{name}.weight_packed": _words(codes.reshape(n, k // 8, 8)),
        f"{name}.weight_scale": scales,
        f"{name}.weight_shape": torch.tensor([n, k]),
    }
    if zeros:
        tensors[f"{name}.weight_zero_point"] = _words(zero_points.reshape(n // 8, 8, -1).transpose(1, 2))
        return tensors, weight
    return tensors, (codes - 8) * scales.float().repeat_interleave(group, 1)


def _fp8(
    name: str,
    suffix: str,
    size: tuple[int, int],
    scales: tuple[int, ...],
    block: tuple[int, int],
    chance: torch.Generator,
) -> _Stored:
    n, k = size
    stored = torch.randn(n, k, generator=chance).mul(30).to(torch.float8_e4m3fn)
    scale = (torch.rand(scales, generator=chance) / 200 + 0.001) * _narrow(k)
    spread = scale.view(-1, 1) if scale.ndim == 1 else scale
    spread = spread.repeat_interleave(block[0], 0)[:n].repeat_interleave(block[1], 1)[:, :k]
    return {name: stored, f"{name}{suffix}": scale}, stored.float() * spread


def _nvfp4(name: str, n: int, k: int, chance: torch.Generator, *, global_divides: bool) -> _Stored:
    codes = torch.randint(0, 16, (n, k), generator=chance)
    scales = (torch.rand(n, k // 16, generator=chance) * 400 + 40).to(torch.float8_e4m3fn)
    whole = (torch.rand((), generator=chance) + 0.5) * _narrow(k) / 4000
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    exponents, halves = codes >> 1 & 3, codes & 1
    values = torch.where(exponents > 0, (1 + halves / 2) * 2.0 ** (exponents - 1), halves / 2) * (1 - 2 * (codes >> 3))
    weight = values * scales.float().repeat_interleave(16, 1) * whole
    stored = {f"{name}.weight_scale": scales}
    if global_divides:
        one = torch.ones(1)
        given = {"weight_packed": packed, "weight_global_scale": one / whole, "input_global_scale": one}
    else:
        given = {"weight": packed, "weight_scale_2": whole, "input_scale": torch.tensor(0.5)}
    return stored | {f"{name}.{part}": tensor for part, tensor in given.items()}, weight


def _codes(n: int, k: int, groups: int, chance: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Return (codes [n, k], zeros [n, groups], scales float16 [n, groups], dequantized weight)."""
    codes = torch.randint(0, 16, (n, k), generator=chance)
    zeros = torch.randint(0, 16, (n, groups), generator=chance)
    scales = ((torch.rand(n, groups, generator=chance) / 40 + 0.01) * _narrow(k)).half()
    spread = [x.repeat_interleave(k // groups, 1) for x in (zeros, scales.float())]
    return codes, zeros, scales, (codes - spread[0]) * spread[1]


def _words(nibbles: torch.Tensor) -> torch.Tensor:
    """Pack eight nibbles of the last dimension into an int32, the first one lowest."""
    total = (nibbles.long() << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).int()


def _narrow(inputs: int) -> float:
    """Return the factor by which weights of so many inputs are smaller than those of 64."""
    return float((64 / inputs) ** 0.5)
