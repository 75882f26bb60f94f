"""The config.json fields of quantized weights, by the tools that write them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tercet.kernels.ops.quantized import EightBits
from tercet.scheduler.file_fields import FileFields, unsupported
from tercet.scheduler.model_files import ModelError
from tercet.scheduler.models.config import quantized_fields

_WHERE = "config.json: quantization_config."
_DEFAULT_GROUP = 128
_NVFP4_GROUP = 16
_BY_METHOD: Mapping[str, FileFields] = {
    "fp8": quantized_fields.FP8,
    "compressed-tensors": quantized_fields.COMPRESSED_TENSORS,
    "awq": quantized_fields.AWQ,
    "gptq": quantized_fields.GPTQ,
    "mxfp4": quantized_fields.MXFP4,
    "modelopt": quantized_fields.MODELOPT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredQuantization:
    """The storage format of a checkpoint's weights. Layers stored in full are recognized by their tensors.

    It is independent of `--quantization`, which quantizes weights at packing
    (`tercet.kernels.native.linear.Quantization`).
    """

    method: Literal["fp8", "int8", "awq", "gptq", "packed", "mxfp4", "nvfp4"]
    """`packed` is compressed-tensors' int4; mxfp4 applies to experts only."""
    group: int = 0
    """Columns that share a scale in four-bit integers; 0 is a whole row."""
    block: tuple[int, int] = (0, 0)
    """Rows and columns that share a scale in fp8; zeros if the scales' shape tells."""
    scales: str = "weight_scale"
    """Name of fp8 scales after the layer's name, unless only their other name is stored. In nvfp4, that of the scale of
    the whole weight.
    """
    first_zero: int = 0
    """The meaning of a stored zero point of 0: old gptq checkpoints store zero points minus one."""
    zeros: bool = True
    """Zero points are stored. Without them, packed codes are 8 more than what they stand for."""
    activations: EightBits | None = None
    """Format of activations that the weights were made for, which a GPU may round to it."""


def parse_quantization(config: Mapping[str, Any]) -> StoredQuantization | None:
    """Parse `quantization_config`; return None if absent. Raise ModelError, in one line, for unknown values."""
    given = config.get("quantization_config")
    if not given:
        return None
    if not isinstance(given, dict):
        raise _wrong("", "is not an object")
    method = given.get("quant_method")
    if not isinstance(method, str) or method not in _BY_METHOD:
        raise _wrong("quant_method", f"{method!r} is not one of {', '.join(_BY_METHOD)}")
    _BY_METHOD[method].check(given, _WHERE)
    match method:
        case "fp8":
            return _fp8(given.get("weight_block_size"), "weight_block_size", inverse=True, activations="fp8")
        case "compressed-tensors":
            return _compressed_tensors(given)
        case "awq":
            _require(given, "zero_point", True)
            _form(given, "version", ("gemm",))
            return StoredQuantization(method="awq", group=_group(given))
        case "gptq":
            form = _form(given, "checkpoint_format", ("gptq", "gptq_v2"))
            group = _group(given)
            _check_dynamic(given.get("dynamic"), group)
            return StoredQuantization(method="gptq", group=group, first_zero=1 if form == "gptq" else 0)
        case "modelopt":
            return _modelopt(given)
    return StoredQuantization(method="mxfp4")


def _compressed_tensors(given: Mapping[str, Any]) -> StoredQuantization:
    """Return the storage of weights that all have one scheme: fp8, int8, nvfp4, or four bits packed in words."""
    groups = given.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise _wrong("config_groups", "must be one group")
    [(name, group)] = groups.items()
    where = f"config_groups.{name}"
    weights = group.get("weights") if isinstance(group, dict) else None
    kind = (weights.get("num_bits"), weights.get("type", "int")) if isinstance(weights, dict) else None
    if not isinstance(weights, dict) or kind not in ((8, "float"), (8, "int"), (4, "float"), (4, "int")):
        raise _wrong(f"{where}.weights", "only floats and integers of 8 and 4 bits are supported")
    quantized_fields.COMPRESSED_GROUP.check(group, f"{_WHERE}{where}.")
    quantized_fields.COMPRESSED_WEIGHTS.check(weights, f"{_WHERE}{where}.weights.")
    where = f"{where}.weights."
    form = group.get("format") or given.get("format")
    if kind == (4, "int"):
        _require_one(form, ("pack-quantized",), "format")
        return _packed(weights, where)
    if kind == (4, "float"):
        _require_one(form, ("nvfp4-pack-quantized",), "format")
        _require_one(weights.get("strategy"), (None, "tensor_group"), f"{where}strategy")
        return _nvfp4(weights.get("group_size"), f"{where}group_size", "weight_global_scale")
    integers = kind == (8, "int")
    forms = ("int-quantized",) if integers else ("float-quantized",)
    _require_one(form, (None, *forms, "naive-quantized"), "format")
    _require(weights, "symmetric", True, where)
    strategy = weights.get("strategy") or ("tensor" if weights.get("group_size") is None else "channel")
    _require_one(strategy, ("tensor", "channel") if integers else ("tensor", "channel", "block"), f"{where}strategy")
    if weights.get("group_size") not in (None, -1):
        raise unsupported(f"{_WHERE}{where}group_size", weights["group_size"], "8 bits have no groups of columns here")
    activations = _activations(group.get("input_activations"), "int8" if integers else "fp8")
    if integers:
        return StoredQuantization(method="int8", activations=activations)
    block = weights.get("block_structure") if strategy == "block" else None
    if strategy == "block" and block is None:
        raise _wrong(f"{where}block_structure", "is missing")
    return _fp8(block, f"{where}block_structure", inverse=False, activations=activations)


def _modelopt(given: Mapping[str, Any]) -> StoredQuantization:
    """Return the storage of weights that NVIDIA's ModelOpt wrote."""
    algorithm = given.get("quant_algo")
    _require_one(algorithm, ("FP8", "NVFP4"), "quant_algo")
    if algorithm == "NVFP4":
        return _nvfp4(given.get("group_size", _NVFP4_GROUP), "group_size", "weight_scale_2")
    return _fp8(None, "", inverse=False, activations="fp8")


def _nvfp4(group: Any, name: str, scale: str) -> StoredQuantization:
    if group != _NVFP4_GROUP:
        raise unsupported(f"{_WHERE}{name}", group, f"NVFP4 has groups of {_NVFP4_GROUP}")
    return StoredQuantization(method="nvfp4", group=_NVFP4_GROUP, scales=scale)


def _activations(given: Any, kind: EightBits) -> EightBits | None:
    """Return the format of activations if it is that of the weights, without zero points."""
    if not isinstance(given, dict) or given.get("symmetric", True) is not True:
        return None
    wanted = (8, "int" if kind == "int8" else "float")
    return kind if (given.get("num_bits"), given.get("type", "int")) == wanted else None


def _packed(weights: Mapping[str, Any], where: str) -> StoredQuantization:
    """Return the storage of four-bit integers."""
    size = weights.get("group_size")
    strategy = weights.get("strategy") or ("channel" if size is None else "group")
    _require_one(strategy, ("channel", "group"), f"{where}strategy")
    columns = _columns(size, f"{where}group_size") if strategy == "group" else 0
    return StoredQuantization(method="packed", group=columns, zeros=weights.get("symmetric") is False)


def _require_one(value: Any, known: tuple[str | None, ...], name: str) -> None:
    if value not in known:
        raise _wrong(name, f"{value!r} is not one of {', '.join(filter(None, known))}")


def _fp8(block: Any, name: str, *, inverse: bool, activations: EightBits | None) -> StoredQuantization:
    if block is None:
        return StoredQuantization(method="fp8", activations=activations)
    if not isinstance(block, list) or len(block) != 2 or any(type(size) is not int or size < 1 for size in block):
        raise _wrong(name, f"{block!r} is not a pair of sizes")
    scales = "weight_scale_inv" if inverse else "weight_scale"
    return StoredQuantization(method="fp8", block=(block[0], block[1]), scales=scales, activations=activations)


def _form(given: Mapping[str, Any], name: str, supported: tuple[str, ...]) -> str:
    """Return the layout of the tensors. As in transformers, its older field takes precedence over `format`."""
    name = name if given.get(name) is not None else "format"
    form = given.get(name)
    form = supported[0] if form is None else form
    if not isinstance(form, str) or form.lower() not in supported:
        raise _wrong(name, f"{form!r} is not supported, only {' and '.join(supported)}")
    return form.lower()


def _group(given: Mapping[str, Any]) -> int:
    """Return the columns of a group, for weights of four bits."""
    bits = given.get("bits", given.get("w_bit"))
    if type(bits) is not int or bits != 4:
        raise unsupported(f"{_WHERE}bits", bits, "only 4 is read")
    sizes = (given.get("group_size"), given.get("q_group_size"), _DEFAULT_GROUP)
    return _columns(next(size for size in sizes if size is not None), "group_size")


def _columns(group: Any, name: str) -> int:
    """Return the columns of a group; 0 for a whole row."""
    if type(group) is not int or (group != -1 and (group < 32 or group & (group - 1))):
        raise _wrong(name, f"{group!r} is neither -1 nor a power of two of at least 32")
    return max(group, 0)


def _check_dynamic(rules: Any, group: int) -> None:
    """Refuse gptqmodel's rules by layer that set other bits or groups. Rules that skip layers need no reading."""
    own = {"bits": (4,), "group_size": (group or -1,)}
    if rules and not isinstance(rules, dict):
        raise _wrong("dynamic", "is not an object")
    for pattern, rule in (rules or {}).items():
        if pattern.startswith("-:"):
            continue
        if not isinstance(rule, dict):
            raise _wrong("dynamic", f"{pattern!r} is not followed by an object")
        for name, value in rule.items():
            if name not in quantized_fields.GPTQ.no_effect and name != "desc_act" and value not in own.get(name, ()):
                raise unsupported(f"{_WHERE}dynamic.{pattern}.{name}", value, "layers have one setting here")


def _require(given: Mapping[str, Any], name: str, only: bool, where: str = "") -> None:
    value = given.get(name)
    if value is not None and value is not only:
        raise unsupported(f"{_WHERE}{where}{name}", value, f"only {str(only).lower()} is supported")


def _wrong(name: str, why: str) -> ModelError:
    return ModelError(f"config.json: quantization_config{'.' * bool(name)}{name}: {why}")
