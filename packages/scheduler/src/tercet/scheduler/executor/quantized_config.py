"""What a config.json says of quantised weights, in the words of the tools that write them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tercet.scheduler.model_files import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredQuantization:
    """How the weights of a checkpoint are stored. Layers that are stored in full are told by their tensors.

    Not what `--quantization` rounds weights to as they are packed: that is `tercet.kernels.native.linear.Quantization`.
    """

    method: Literal["fp8", "awq", "gptq", "mxfp4"]
    """Of mxfp4 are experts alone."""
    group: int = 0
    """Columns that share a scale in awq and gptq; 0 is a whole row."""
    block: tuple[int, int] = (0, 0)
    """Rows and columns that share a scale in fp8; zeros where the scales' shape says it."""
    scales: str = "weight_scale"
    """What fp8 scales are called after the layer's name."""
    first_zero: int = 0
    """What a stored zero point of 0 means: old gptq checkpoints store one less."""


def parse_quantization(config: Mapping[str, Any]) -> StoredQuantization | None:
    """Read `quantization_config`; None where there is none. Raises ModelError with one line for what is not known."""
    given = config.get("quantization_config")
    if not given:
        return None
    if not isinstance(given, dict):
        raise _wrong("", "is not an object")
    match given.get("quant_method"):
        case "fp8":
            return _fp8(given.get("weight_block_size"), "weight_block_size", inverse=True)
        case "compressed-tensors":
            return _compressed_tensors(given)
        case "awq":
            _require(given, "version", "gemm", "gemm")
            _require(given, "zero_point", True, True)
            return StoredQuantization(method="awq", group=_group(given))
        case "gptq":
            _require(given, "desc_act", False, False)
            kind = given.get("checkpoint_format", "gptq")
            if kind not in ("gptq", "gptq_v2"):
                raise _wrong("checkpoint_format", f"{kind!r} is not supported, only gptq and gptq_v2")
            return StoredQuantization(method="gptq", group=_group(given), first_zero=1 if kind == "gptq" else 0)
        case "mxfp4":
            return StoredQuantization(method="mxfp4")
        case method:
            raise _wrong("quant_method", f"{method!r} is not one of fp8, compressed-tensors, awq, gptq, mxfp4")


def _compressed_tensors(given: Mapping[str, Any]) -> StoredQuantization:
    """Weights in fp8, of one group that is every linear layer; that activations might be rounded too is left out."""
    groups = given.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise _wrong("config_groups", "must be one group")
    [(name, group)] = groups.items()
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict) or (weights.get("num_bits"), weights.get("type")) != (8, "float"):
        raise _wrong(f"config_groups.{name}.weights", "only 8-bit floats are supported")
    strategy = weights.get("strategy")
    if strategy not in ("tensor", "channel", "block"):
        raise _wrong(f"config_groups.{name}.weights.strategy", f"{strategy!r} is not one of tensor, channel, block")
    block = weights.get("block_structure") if strategy == "block" else None
    return _fp8(block, f"config_groups.{name}.weights.block_structure", inverse=False)


def _fp8(block: Any, name: str, *, inverse: bool) -> StoredQuantization:
    if block is None:
        return StoredQuantization(method="fp8")
    if not isinstance(block, list) or len(block) != 2 or any(type(size) is not int or size < 1 for size in block):
        raise _wrong(name, f"{block!r} is not a pair of sizes")
    return StoredQuantization(
        method="fp8", block=(block[0], block[1]), scales="weight_scale_inv" if inverse else "weight_scale"
    )


def _group(given: Mapping[str, Any]) -> int:
    """Columns of a group, for weights of four bits."""
    _require(given, "bits", 4, given.get("w_bit"))
    group = given.get("group_size", given.get("q_group_size"))
    if type(group) is not int or (group != -1 and (group < 32 or group & (group - 1))):
        raise _wrong("group_size", f"{group!r} is neither -1 nor a power of two of at least 32")
    return max(group, 0)


def _require(given: Mapping[str, Any], name: str, only: Any, default: Any) -> None:
    value = given.get(name, default)
    if (value.lower() if isinstance(value, str) else value) != only:
        raise _wrong(name, f"{value!r} is not supported, only {only!r}")


def _wrong(name: str, why: str) -> ModelError:
    return ModelError(f"config.json: quantization_config{'.' * bool(name)}{name}: {why}")
