"""The conversion of quantized layers of public checkpoints to our layout (`QuantizedWeight`), without their libraries.

These tensors are stored under a layer's name, for a weight of n outputs and k inputs in groups of g inputs:
- fp8 (compressed-tensors, and the block form of DeepSeek-V3): weight e4m3 [n, k], and scales for all of it, for each
output [n, 1], or for blocks of 128 x 128. They are called weight_scale or weight_scale_inv; both multiply.
- int8 (compressed-tensors): weight int8 [n, k], and weight_scale for all of it or for each output.
- AWQ (AutoAWQ's "gemm"): qweight int32 [k, n / 8], qzeros int32 [k / g, n / 8], scales [k / g, n]. A word holds eight
outputs, nibble by nibble in the order 0 2 4 6 1 3 5 7.
- packed (compressed-tensors' "pack-quantized"): weight_packed int32 [n, k / 8], of eight inputs in order; weight_scale
[n, k / g]; weight_zero_point int32 [n / 8, k / g], of eight outputs in order, if there are any; weight_shape.
- mxfp4, for experts only: see `mxfp4_experts`. nvfp4: see `nvfp4_weights`.
- GPTQ (AutoGPTQ): qweight int32 [k / 8, n], of eight inputs in order; qzeros int32 [k / g, n / 8], of eight outputs in
order, each stored minus one modulo 16; scales [k / g, n]; g_idx, the group of each input, which must be ascending here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from tercet.kernels.ops.moe import QuantizedExperts
from tercet.kernels.ops.quantized import (
    MXFP4_BLOCK,
    QuantizedWeight,
    concat_rows,
    dequantize,
    pack_int4,
    quantize,
    with_tall_blocks,
)
from tercet.scheduler.model_files import ModelError, StoredTensor
from tercet.scheduler.models.config.quantized_config import StoredQuantization
from tercet.scheduler.models.layers.linear import FusedLinear, Linear
from tercet.scheduler.models.layers.moe import ExpertLinear, Experts
from tercet.scheduler.models.layers.shard import Cut
from tercet.scheduler.models.weights.checkpoint_names import ExpertNames, FusedNames
from tercet.scheduler.models.weights.mxfp4_experts import Mxfp4Experts, Read
from tercet.scheduler.models.weights.nvfp4_weights import DTYPES, GROUP, nvfp4_shapes, read_nvfp4

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_FP8_SCALES = ("weight_scale", "weight_scale_inv")
_FLOATS = ("F32", "BF16", "F16")
_STORED_AS = {"fp8": "F8_E4M3", "int8": "I8", "nvfp4": "U8"}
"""The dtype of a quantized layer's `weight`, if it has a tensor of that name."""
_UNUSED = {
    "fp8": ("input_scale", "activation_scale"),
    "int8": ("input_scale", "activation_scale"),
    "packed": ("weight_shape",),
    "nvfp4": ("input_scale", "input_global_scale"),
}
"""Scales of activations, whose own largest elements are used here, and shapes, which config.json implies."""
_TALL = 128
"""Rows of a weight's blocks in fp8, of which its kernels take whole ones."""
_WORD_TENSORS = (".qweight", ".qzeros", ".weight_packed", ".weight_zero_point")
_SCALE_BYTES = 4
_PACKED_ZERO = 8
"""Zero point of packed codes without stored ones."""


@dataclass(frozen=True, eq=False)
class QuantizedLinear:
    """A linear layer of the model, and its parts in the checkpoint with the rows held of each.

    A layer of experts has parts of each expert.
    """

    target: Linear | ExpertLinear | torch.Tensor
    """A layer that can hold a quantized weight, or the memory of a weight in full."""
    parts: dict[str, Cut]
    inputs: Cut
    """The held columns of every part, a single range."""
    quantization: StoredQuantization
    stored: Mapping[str, StoredTensor] = field(default_factory=dict, repr=False)
    """The tensors of the checkpoint."""

    def shapes(self, stored: Mapping[str, StoredTensor]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors that are read; fp8 scales may have several shapes, so theirs is the
        stored one.
        """
        method, inputs = self.quantization.method, self.inputs.whole
        groups = inputs // (self.quantization.group or inputs)
        result: dict[str, tuple[int, ...]] = {}
        for prefix, rows in self.parts.items():
            outputs = rows.whole
            match method:
                case "fp8" | "int8":
                    name = self._scales(prefix)
                    result[f"{prefix}.weight"] = (outputs, inputs)
                    result[name] = self._fp8_scales(outputs, stored.get(name))
                case "nvfp4":
                    result |= nvfp4_shapes(prefix, self.quantization.scales, outputs, inputs, stored)
                case "awq":
                    result[f"{prefix}.qweight"] = (inputs, outputs // 8)
                case "gptq":
                    result[f"{prefix}.qweight"] = (inputs // 8, outputs)
                case "packed":
                    result[f"{prefix}.weight_packed"] = (outputs, inputs // 8)
                    result[f"{prefix}.weight_scale"] = (outputs, groups)
                    if self.quantization.zeros:
                        result[f"{prefix}.weight_zero_point"] = (outputs // 8, groups)
            if method in ("awq", "gptq"):
                result[f"{prefix}.qzeros"] = (groups, outputs // 8)
                result[f"{prefix}.scales"] = (groups, outputs)
        return result

    def _fp8_scales(self, outputs: int, stored: StoredTensor | None) -> tuple[int, ...]:
        """Return the shape of fp8 scales: per block, or else per tensor or per output, as stored."""
        rows, columns = self.quantization.block
        if rows:
            return -(-outputs // rows), -(-self.inputs.whole // columns)
        if stored is not None and stored.shape in ((), (1,), (1, 1), (outputs,), (1, outputs)):
            return stored.shape
        return outputs, 1

    def _scales(self, prefix: str) -> str:
        """Return the name of a part's stored fp8 scales."""
        names = [f"{prefix}.{kind}" for kind in (self.quantization.scales, *_FP8_SCALES)]
        return next((name for name in names if name in self.stored), names[0])

    def check_dtypes(self) -> None:
        """Raise ModelError for tensors of an unexpected dtype."""
        for name in self.shapes(self.stored):
            kinds = (_STORED_AS.get(self.quantization.method, ""),) if name.endswith(".weight") else _FLOATS
            kinds = ("I32",) if name.endswith(_WORD_TENSORS) else kinds
            if self.quantization.method == "nvfp4" and (kind := DTYPES.get(name.rpartition(".")[2])):
                kinds = (kind,)
            if name in self.stored and self.stored[name].dtype not in kinds:
                raise ModelError(f"{name}: stored as {self.stored[name].dtype}, and only {', '.join(kinds)} is read")

    def orders(self) -> list[str]:
        """Return the names of the tensors that may give each input its group."""
        return [f"{prefix}.g_idx" for prefix in self.parts] if self.quantization.method == "gptq" else []

    def check_order(self, name: str, order: torch.Tensor) -> None:
        """Raise ModelError unless the groups of inputs are contiguous and ascending."""
        inputs = self.inputs.whole
        if order.shape != (inputs,) or not torch.equal(
            order.long(), torch.arange(inputs) // (self.quantization.group or inputs)
        ):
            raise ModelError(
                f"{name}: the inputs are not in the order of their groups (desc_act, act-order), which is not "
                "supported: quantize the model without desc_act"
            )

    def extras(self) -> list[str]:
        """Return names that may be stored in addition to those of `shapes`."""
        unused = _UNUSED.get(self.quantization.method, ())
        return [*self.orders(), *(f"{prefix}.{name}" for prefix in self.parts for name in unused)]

    def missing_biases(self) -> list[str]:
        """Return the names that biases would have, if the layer has none."""
        if isinstance(self.target, Linear) and self.target.bias is not None:
            return []
        return [f"{prefix}.bias" for prefix in self.parts]

    def load(self, read: Read, device: torch.device, dtype: torch.dtype | None) -> None:
        """Set the layer's weight: quantized, or in full if `dtype` is given or nothing else is possible."""
        if isinstance(self.target, torch.Tensor):
            self._put(read, self.target)
        elif dtype is not None:
            memory = torch.empty_like(self.target.weight, dtype=dtype, device=device)
            self._put(read, memory.view(-1, self.inputs.held))
            self.target.weight = nn.Parameter(memory, requires_grad=False)
        else:
            weight = concat_rows([self._held(prefix, read) for prefix in self.parts])
            if isinstance(self.target, Linear):
                whole = self.target.order is None and weight.format == "fp8"
                self.target.quantized = (
                    with_tall_blocks(weight, _TALL) if whole and self.quantization.block[0] else weight
                )
            else:
                self.target.quantized = QuantizedExperts(weight, len(self.target.weight))

    def _put(self, read: Read, memory: torch.Tensor) -> None:
        """Dequantize the weight into memory [outputs, inputs]."""
        parts = torch.split(memory, [rows.held for rows in self.parts.values()])
        for prefix, part in zip(self.parts, parts, strict=True):
            part.copy_(dequantize(self._held(prefix, read), memory.dtype))

    def _held(self, prefix: str, read: Read) -> QuantizedWeight:
        """Return the held rows and columns of a part."""
        whole = self._part(prefix, read)
        return concat_rows(
            [whole.part(rows, columns) for rows in self.parts[prefix].runs for columns in self.inputs.runs]
        )

    def _part(self, prefix: str, read: Read) -> QuantizedWeight:
        """Convert a whole part."""
        quantization = self.quantization
        match quantization.method:
            case "fp8":
                scales = read(self._scales(prefix))
                return _as_fp8(read(f"{prefix}.weight"), scales, quantization)
            case "nvfp4":
                return read_nvfp4(prefix, quantization.scales, read)
            case "int8":
                return _as_int8(read(f"{prefix}.weight"), read(self._scales(prefix)), quantization)
            case "awq":
                codes = _words(read(f"{prefix}.qweight"), 1, _AWQ_ORDER).T
                zeros = _words(read(f"{prefix}.qzeros"), 1, _AWQ_ORDER).T
            case "gptq":
                codes = _words(read(f"{prefix}.qweight"), 0).T
                zeros = (_words(read(f"{prefix}.qzeros"), 1).T + quantization.first_zero) & 15
            case "packed":
                codes, scales = _words(read(f"{prefix}.weight_packed"), 1), read(f"{prefix}.weight_scale").float()
                zeros = torch.full_like(scales, _PACKED_ZERO)
                if quantization.zeros:
                    zeros = _words(read(f"{prefix}.weight_zero_point"), 0)
        if quantization.method != "packed":
            scales = read(f"{prefix}.scales").T.float()
        group = quantization.group or self.inputs.whole
        return QuantizedWeight(
            format="int4",
            codes=pack_int4(codes.to(torch.uint8).contiguous()),
            scales=scales.contiguous(),
            zeros=zeros.float().contiguous(),
            block=(1, group),
        )


def _as_int8(weight: torch.Tensor, scales: torch.Tensor, quantization: StoredQuantization) -> QuantizedWeight:
    """Convert an int8 weight; a scale of the whole weight becomes one for each output."""
    n, k = weight.shape
    spread = scales.float().reshape(-1, 1).expand(n, 1).contiguous()
    return QuantizedWeight(
        format="int8", codes=weight, scales=spread, zeros=None, block=(1, k), activations=quantization.activations
    )


def _as_fp8(weight: torch.Tensor, scales: torch.Tensor, quantization: StoredQuantization) -> QuantizedWeight:
    """Convert an fp8 weight; scales of any of the three shapes become one row for each output."""
    (n, k), (rows, columns) = weight.shape, quantization.block
    if rows:
        spread = scales.float().repeat_interleave(rows, 0)[:n]
    else:
        spread, columns = scales.float().reshape(-1, 1).expand(n, 1), k
    return QuantizedWeight(
        format="fp8",
        codes=weight.view(torch.uint8),
        scales=spread.contiguous(),
        zeros=None,
        block=(1, columns),
        activations=quantization.activations,
    )


def quantized_as(weight: torch.Tensor, quantization: StoredQuantization, *, tall: bool = True) -> QuantizedWeight:
    """Quantize a weight [n, k] to the layout of a checkpoint of this kind, `tall` unless it is one of experts."""
    if quantization.method == "mxfp4":
        return quantize(weight, "mxfp4", MXFP4_BLOCK)
    if quantization.method == "nvfp4":
        return quantize(weight, "int8", (1, GROUP))
    if quantization.method in ("fp8", "int8"):
        rows = _TALL if tall and quantization.block[0] == _TALL and not weight.shape[0] % _TALL else 1
        rounded = quantize(weight, quantization.method, (rows, quantization.block[1] or weight.shape[1]))
        return replace(rounded, activations=quantization.activations)
    return quantize(weight, "int4", (1, quantization.group or weight.shape[1]))


def quantized_bytes(outputs: int, inputs: int, quantization: StoredQuantization, *, tall: bool = True) -> int:
    """Return the bytes of a weight [outputs, inputs] that a checkpoint of this kind has quantized; see `quantized_as`
    for `tall`.
    """
    if quantization.method == "mxfp4":
        return outputs * inputs // 2 + outputs * inputs // MXFP4_BLOCK[1]
    if quantization.method in _STORED_AS:
        rows = _TALL if tall and quantization.block[0] == _TALL and not outputs % _TALL else 1
        columns = quantization.block[1] or quantization.group or inputs
        return outputs * inputs + _SCALE_BYTES * outputs // rows * -(-inputs // columns)
    groups = -(-inputs // (quantization.group or inputs))
    return outputs * (-(-inputs // 2) + 2 * _SCALE_BYTES * groups)  # a scale and a zero point for each group


def quantized_linears(
    model: nn.Module, quantization: StoredQuantization, stored: Mapping[str, StoredTensor]
) -> list[QuantizedLinear | Mxfp4Experts]:
    """Return the layers that a checkpoint has quantized; allocate memory for the others on the model's device.

    Each projection of all experts is a layer; it is dequantized if only some experts are quantized. Raise ModelError
    for another layer of which only some parts are quantized, and for shapes that cannot be.
    """
    found: list[QuantizedLinear | Mxfp4Experts] = []
    names, fused = ExpertNames.of(stored), FusedNames.of(stored)
    device = next(parameter.device for parameter in model.parameters() if not parameter.is_meta)
    for path, module in names.modules(model):
        if isinstance(module, Experts):
            for experts in (module.gate_up_proj, module.down_proj):
                found += _quantized_experts(path, module, experts, names, quantization, stored, device)
        if not isinstance(module, Linear) or not module.weight.is_meta:
            continue
        outputs, inputs = module.weight.shape
        parts = fused.parts(path, module) if isinstance(module, FusedLinear) else {path: Cut.all(outputs)}
        linear = QuantizedLinear(module, parts, module.cuts.get("weight", Cut.all(inputs)), quantization, stored)
        quantized = [_is_quantized(prefix, quantization, stored) for prefix in parts]
        if any(quantized) and not all(quantized):
            raise ModelError(f"{path}: only some of {', '.join(parts)} are quantised, but they are computed as one")
        if any(quantized):
            _check_sizes(linear)
            found.append(linear)
        else:
            _allocate(module, device)
    return found


def _quantized_experts(
    path: str,
    experts: Experts,
    linear: ExpertLinear,
    names: ExpertNames,
    quantization: StoredQuantization,
    stored: Mapping[str, StoredTensor],
    device: torch.device,
) -> Sequence[QuantizedLinear | Mxfp4Experts]:
    """Return one of the linears of the experts at `path` as one layer, as several in full, or as none."""
    up = linear is experts.gate_up_proj
    every_output, every_input = map(Cut.all, linear.weight.shape[1:])
    if names.parts is None:
        name = f"{path}.{'gate_up_proj' if up else 'down_proj'}"
        if quantization.method == "mxfp4" and f"{name}_blocks" in stored:
            rows, columns = (names.gate_up_rows(experts), every_input) if up else (every_output, experts.columns)
            return [Mxfp4Experts(linear, name, rows, columns, experts.cut, interleaved=names.interleaved and up)]
        if any(tensor.dtype in _STORED_AS.values() for name, tensor in stored.items() if name.startswith(f"{path}.")):
            raise ModelError(f"{path}: quantised experts in one tensor are not supported, only one by one")
        _allocate(linear, device)
        return []
    rows, columns = (experts.columns, every_input) if up else (every_output, experts.columns)
    prefixes = names.rows(path, experts, linear)
    quantized = [prefix for prefix in prefixes if _is_quantized(prefix, quantization, stored)]
    if len(quantized) == len(prefixes):
        found = [QuantizedLinear(linear, dict.fromkeys(prefixes, rows), columns, quantization, stored)]
    else:
        _allocate(linear, device)
        memory = names.rows(path, experts, linear)
        found = [QuantizedLinear(memory[prefix], {prefix: rows}, columns, quantization, stored) for prefix in quantized]
    for each in found:
        _check_sizes(each)
    return found


def _allocate(linear: Linear | ExpertLinear, device: torch.device) -> None:
    """Allocate memory for a weight in full."""
    linear.weight = nn.Parameter(torch.empty_like(linear.weight, device=device), requires_grad=False)


def _is_quantized(prefix: str, quantization: StoredQuantization, stored: Mapping[str, StoredTensor]) -> bool:
    if quantization.method == "mxfp4":
        return False
    if quantization.method not in _STORED_AS:
        return f"{prefix}.weight" not in stored
    weight = stored.get(f"{prefix}.weight")
    return weight is None or weight.dtype == _STORED_AS[quantization.method]


def _check_sizes(linear: QuantizedLinear) -> None:
    linear.check_dtypes()
    if linear.quantization.method in ("fp8", "int8"):
        return
    inputs, outputs = linear.inputs.whole, [rows.whole for rows in linear.parts.values()]
    group, words = linear.quantization.group or inputs, linear.quantization.method != "nvfp4"
    if inputs % group or (words and (inputs % 32 or any(size % 8 for size in outputs))):
        sizes = f"{inputs} inputs in groups of {group} and {outputs} outputs"
        raise ModelError(f"{next(iter(linear.parts))}: {sizes} do not divide evenly")


def _words(packed: torch.Tensor, dim: int, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> torch.Tensor:
    """Return the nibbles of int32 words along a dimension, int32; nibble i is element order[i] of the word's eight."""
    place = [order.index(element) for element in range(8)]
    shifts = torch.tensor([4 * nibble for nibble in place], dtype=torch.int32, device=packed.device)
    if dim == 0:
        return (packed[:, None] >> shifts[:, None] & 15).flatten(0, 1)
    return (packed[..., None] >> shifts & 15).flatten(1)
