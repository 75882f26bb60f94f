"""NVFP4 weights: e2m1 codes, an e4m3 scale for each 16 inputs, and one float32 scale of the whole weight.

A code is a multiple of a half and at most 6, so twice a code is an integer of 8 bits. The weight is held in that form,
exactly, with both scales and the half in one float32 scale for each 16 inputs: 10 bits an element, of 4.5 stored. Two
tools write it, under different names after the layer's:
- compressed-tensors ("nvfp4-pack-quantized"): weight_packed, weight_scale, and weight_global_scale, which divides.
- ModelOpt: weight, weight_scale, and weight_scale_2, which multiplies.
Both pack two inputs in a byte, the first one lowest.
"""

from collections.abc import Mapping

import torch

from tercet.kernels.ops.quantized import E2M1, QuantizedWeight
from tercet.scheduler.model_files import StoredTensor
from tercet.scheduler.models.weights.mxfp4_experts import Read

GROUP = 16
"""Inputs that share a scale."""
DIVISOR = "weight_global_scale"
"""Name of the scale that divides."""
DTYPES = {"weight_packed": "U8", "weight": "U8", "weight_scale": "F8_E4M3"}
"""Stored dtypes of tensors by the end of their names; others are floats."""
_DOUBLED = [int(2 * value) for value in E2M1]


def nvfp4_shapes(
    prefix: str, scale: str, outputs: int, inputs: int, stored: Mapping[str, StoredTensor]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's tensors; `scale` names that of the whole weight, of no dimension or one."""
    whole = f"{prefix}.{scale}"
    shape = stored[whole].shape if whole in stored else ()
    return {
        _codes(prefix, scale): (outputs, inputs // 2),
        f"{prefix}.weight_scale": (outputs, inputs // GROUP),
        whole: shape if shape in ((), (1,)) else (1,),
    }


def read_nvfp4(prefix: str, scale: str, read: Read) -> QuantizedWeight:
    """Read a layer's whole weight as int8."""
    scales, factor = read(f"{prefix}.weight_scale").float(), read(f"{prefix}.{scale}").float()
    scales = scales / factor if scale == DIVISOR else scales * factor
    packed = read(_codes(prefix, scale))
    nibbles = torch.stack([packed & 15, packed >> 4], 2).flatten(1).long()
    table = torch.tensor([*_DOUBLED, *(-value for value in _DOUBLED)], dtype=torch.int8, device=packed.device)
    return QuantizedWeight(format="int8", codes=table[nibbles], scales=scales * 0.5, zeros=None, block=(1, GROUP))


def _codes(prefix: str, scale: str) -> str:
    return f"{prefix}.weight_packed" if scale == DIVISOR else f"{prefix}.weight"
