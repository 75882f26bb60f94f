"""Checkpoint tensors that GGUF tensors stand for: their names in transformers, and the changes that llama.cpp's
converters made, undone.

Rows of queries and keys are permuted in architectures whose rotation has adjacent pairs there, Gemma's norms have 1
added, all experts of a layer are one tensor, and gates and ups of gpt-oss are apart.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tercet.scheduler.gguf.gguf_config import FACTOR_TENSORS
from tercet.scheduler.gguf.gguf_file import GGUFTensor
from tercet.scheduler.gguf.gguf_paths import GGUFError

Array = npt.NDArray[Any]

_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_DEEPSEEK = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_MIXTRAL = {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"}


class TensorNames(NamedTuple):
    """The names and changes of an architecture's tensors."""

    layers: Mapping[str, str] = {}
    """Names within a layer that differ from Llama's."""
    permuted: bool = False
    centered: bool = False
    """Norms have 1 added."""
    experts: str = "mlp.experts"
    expert_parts: Mapping[str, str] = _EXPERTS


NAMES = {
    "LlamaForCausalLM": TensorNames(permuted=True),
    "MixtralForCausalLM": TensorNames(
        {"ffn_gate_inp": "block_sparse_moe.gate"},
        permuted=True,
        experts="block_sparse_moe.experts",
        expert_parts=_MIXTRAL,
    ),
    "GraniteForCausalLM": TensorNames(permuted=True),
    "SmolLM3ForCausalLM": TensorNames(permuted=True),
    "Qwen2ForCausalLM": TensorNames(),
    "Qwen2MoeForCausalLM": TensorNames(),
    "Qwen3ForCausalLM": TensorNames(),
    "Qwen3MoeForCausalLM": TensorNames(),
    "Phi3ForCausalLM": TensorNames({"ffn_up": "mlp.gate_up_proj"}),
    "Gemma2ForCausalLM": TensorNames(_GEMMA, centered=True),
    "Gemma3ForCausalLM": TensorNames(_GEMMA, centered=True),
    "GptOssForCausalLM": TensorNames(
        {
            "post_attention_norm": "post_attention_layernorm",
            "attn_post_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
        }
    ),
    "DeepseekV2ForCausalLM": TensorNames(_DEEPSEEK),
    "DeepseekV3ForCausalLM": TensorNames(_DEEPSEEK),
}
"""The tensors of each architecture that GGUF files are read of, by its name in transformers."""


class Piece(NamedTuple):
    """Blocks of one stored type between two byte offsets."""

    type: str
    shape: tuple[int, ...]
    start: int
    end: int


def _same(arrays: list[Array]) -> Array:
    return arrays[0]


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor of a checkpoint, made of stored pieces."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    make: Callable[[list[Array]], Array] = _same
    """The change from the pieces' values to the tensor's."""
    raw: bool = False
    """`make` reads the pieces' bytes, not their values."""

    @property
    def changes_values(self) -> bool:
        """Return whether `make` does more than to order rows."""
        return self.make is _minus_one

    @property
    def start(self) -> int:
        """The byte offset of the first piece."""
        return self.pieces[0].start

    @property
    def size(self) -> int:
        """The bytes of all pieces."""
        return sum(piece.end - piece.start for piece in self.pieces)


def checkpoint_tensors(tensors: Mapping[str, GGUFTensor], config: Mapping[str, Any]) -> dict[str, CheckpointTensor]:
    """Map the checkpoint names of a model with that config.json to what the stored tensors say.

    Raise GGUFError for a tensor without a place. `tensors` may be those of one part of a split model.
    """
    architecture = config["architectures"][0]
    found = {}
    for tensor in _tensors(tensors, NAMES[architecture], config):
        if tensor.name in found:
            raise GGUFError(f"{tensor.name} is stored in two ways")
        found[tensor.name] = tensor
    return found


def _tensors(
    tensors: Mapping[str, GGUFTensor], names: TensorNames, config: Mapping[str, Any]
) -> Iterator[CheckpointTensor]:
    table = {**_LAYER_NAMES, **names.layers}
    joined = _Joined(tensors, config)
    for name, tensor in tensors.items():
        if name in FACTOR_TENSORS:
            continue
        if name in _WHOLE:
            yield _plain(_WHOLE[name], tensor, centered=names.centered and "norm" in name)
            continue
        layer = _LAYER.fullmatch(name)
        if layer is None:
            yield from joined.sinks_or_refuse(name, tensor)
            continue
        prefix, stem, kind = f"model.layers.{layer[1]}.", layer[2], layer[3]
        if (own := joined.of(prefix, f"blk.{layer[1]}.", stem, kind)) is not None:
            yield from own
        elif stem in _EXPERTS and kind == "weight":
            yield from _experts(prefix + names.experts, names.expert_parts[stem], tensor)
        elif stem == "exp_probs_b":
            yield _plain(f"{prefix}mlp.gate.e_score_correction_bias", tensor)
        elif stem in table:
            heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(stem)
            here = f"{prefix}{table[stem]}.{kind}"
            if heads is not None and names.permuted:
                yield _unpermuted(here, tensor, config[heads])
            else:
                yield _plain(here, tensor, centered=names.centered and "norm" in stem)
        else:
            raise GGUFError(f"the tensor {name} is not known of {config['architectures'][0]}")


def _piece(tensor: GGUFTensor) -> Piece:
    return Piece(tensor.type, tensor.shape, tensor.start, tensor.end)


def _plain(name: str, tensor: GGUFTensor, *, centered: bool = False) -> CheckpointTensor:
    shape = tensor.shape
    if name.endswith(".shared_expert_gate.weight") and len(shape) == 1:
        shape = (1, *shape)
        return CheckpointTensor(name, shape, (_piece(tensor)._replace(shape=shape),))
    return CheckpointTensor(name, shape, (_piece(tensor),), _minus_one if centered else _same)


def _minus_one(arrays: list[Array]) -> Array:
    one: Array = arrays[0] - np.float32(1)
    return one


def _unpermuted(name: str, tensor: GGUFTensor, heads: int) -> CheckpointTensor:
    if tensor.shape[0] % (2 * heads):
        raise GGUFError(f"{tensor.name}: {tensor.shape[0]} rows are no pairs of {heads} heads")
    return CheckpointTensor(name, tensor.shape, (_piece(tensor),), partial(_halves_of_pairs, heads=heads))


def _halves_of_pairs(arrays: list[Array], heads: int) -> Array:
    """Return the rows of each head with the first elements of all pairs before the second ones."""
    rows = arrays[0]
    apart = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:]).swapaxes(1, 2)
    return apart.reshape(rows.shape)


def _experts(prefix: str, part: str, tensor: GGUFTensor) -> Iterator[CheckpointTensor]:
    """Yield the weight of each expert, whose blocks are a run of the tensor's."""
    if len(tensor.shape) != 3:
        raise GGUFError(f"{tensor.name}: {len(tensor.shape)} dimensions are not experts, outputs and inputs")
    experts, *shape = tensor.shape
    size = (tensor.end - tensor.start) // experts
    for expert in range(experts):
        start = tensor.start + expert * size
        piece = Piece(tensor.type, tuple(shape), start, start + size)
        yield CheckpointTensor(f"{prefix}.{expert}.{part}.weight", tuple(shape), (piece,))


class _Joined:
    """Checkpoint tensors of two stored ones: DeepSeek's keys and values, gpt-oss's gates and ups."""

    def __init__(self, tensors: Mapping[str, GGUFTensor], config: Mapping[str, Any]) -> None:
        self._tensors = tensors
        self._gpt_oss = config["architectures"][0] == "GptOssForCausalLM"
        self._deepseek = config["architectures"][0].startswith("Deepseek")

    def sinks_or_refuse(self, name: str, tensor: GGUFTensor) -> Iterator[CheckpointTensor]:
        """Yield the sinks of gpt-oss, which some files store without a suffix."""
        sinks = re.fullmatch(r"blk\.(\d+)\.attn_sinks", name)
        if sinks is None or not self._gpt_oss:
            raise GGUFError(f"the tensor {name} is not known")
        yield _plain(f"model.layers.{sinks[1]}.self_attn.sinks", tensor)

    def of(self, prefix: str, stored: str, stem: str, kind: str) -> list[CheckpointTensor] | None:
        """Return the tensors that a stored one begins; an empty list if another one does, None for all others."""
        if self._deepseek and stem in ("attn_k_b", "attn_v_b"):
            return self._latent(prefix, stored) if stem == "attn_k_b" else []
        if not self._gpt_oss:
            return None
        if stem == "attn_sinks":
            return [_plain(f"{prefix}self_attn.sinks", self._get(f"{stored}attn_sinks.{kind}"))]
        if stem not in _EXPERTS:
            return None
        if stem == "ffn_up_exps":
            return []
        path = f"{prefix}mlp.experts."
        if stem == "ffn_down_exps":
            return _joined_experts(f"{path}down_proj", kind, (self._get(f"{stored}{stem}.{kind}"),))
        both = self._get(f"{stored}{stem}.{kind}"), self._get(f"{stored}ffn_up_exps.{kind}")
        return _joined_experts(f"{path}gate_up_proj", kind, both)

    def _get(self, name: str) -> GGUFTensor:
        if name not in self._tensors:
            raise GGUFError(f"{name} is missing, or in another part of a split file than the tensor that needs it")
        return self._tensors[name]

    def _latent(self, prefix: str, stored: str) -> list[CheckpointTensor]:
        keys, values = self._get(f"{stored}attn_k_b.weight"), self._get(f"{stored}attn_v_b.weight")
        if len(keys.shape) != 3 or len(values.shape) != 3 or keys.shape[:2] != (values.shape[0], values.shape[2]):
            raise GGUFError(f"{keys.name}: the shapes {list(keys.shape)} and {list(values.shape)} do not fit")
        shape = keys.shape[0] * (keys.shape[2] + values.shape[1]), keys.shape[1]
        pieces = _piece(keys), _piece(values)
        return [CheckpointTensor(f"{prefix}self_attn.kv_b_proj.weight", shape, pieces, _keys_and_values)]


def _keys_and_values(arrays: list[Array]) -> Array:
    keys, values = arrays  # [heads, rank, nope], [heads, values, rank]
    return np.concatenate([keys.swapaxes(1, 2), values], 1).reshape(-1, keys.shape[1])


def _joined_experts(name: str, kind: str, stored: tuple[GGUFTensor, ...]) -> list[CheckpointTensor]:
    """Return gpt-oss's tensor of all experts; gates and ups interleaved, MXFP4 as blocks and scales."""
    first, pieces = stored[0], tuple(_piece(tensor) for tensor in stored)
    if any(tensor.shape != first.shape or tensor.type != first.type for tensor in stored):
        raise GGUFError(f"{first.name}: gates and ups differ in shape or type")
    if len(first.shape) != (2 if kind == "bias" else 3):
        raise GGUFError(f"{first.name}: the shape {list(first.shape)} does not fit")
    experts, rows = first.shape[0], first.shape[1] * len(stored)
    if kind == "bias":
        return [CheckpointTensor(f"{name}_bias", (experts, rows), pieces, _interleaved)]
    inputs = first.shape[2]
    if first.type != "MXFP4":
        return [CheckpointTensor(name, (experts, inputs, rows), pieces, _turned)]
    scales = experts, rows, inputs // 32
    return [
        CheckpointTensor(f"{name}_blocks", (*scales, 16), pieces, partial(_mxfp4_blocks, shape=scales), raw=True),
        CheckpointTensor(f"{name}_scales", scales, pieces, partial(_mxfp4_scales, shape=scales), raw=True),
    ]


def _interleaved(arrays: list[Array]) -> Array:
    """Return the rows [experts, rows, ...] of several tensors in turn."""
    experts, rows, *rest = arrays[0].shape
    return np.stack(arrays, 2).reshape(experts, rows * len(arrays), *rest)


def _turned(arrays: list[Array]) -> Array:
    return _interleaved(arrays).swapaxes(1, 2)


def _mxfp4(arrays: list[Array], shape: tuple[int, int, int]) -> Array:
    """Return the stored blocks of 17 bytes, a scale and 32 codes: [experts, rows, blocks, 17]."""
    experts, rows, blocks = shape
    return _interleaved([array.reshape(experts, rows // len(arrays), blocks, 17) for array in arrays])


def _mxfp4_scales(arrays: list[Array], shape: tuple[int, int, int]) -> Array:
    return np.ascontiguousarray(_mxfp4(arrays, shape)[..., 0])


def _mxfp4_blocks(arrays: list[Array], shape: tuple[int, int, int]) -> Array:
    """Return adjacent codes in each byte. Stored, code j shares its byte with code j + 16."""
    stored = _mxfp4(arrays, shape)[..., 1:]
    codes = np.concatenate([stored & 15, stored >> 4], -1)
    joined: Array = codes[..., ::2] | codes[..., 1::2] << 4
    return joined
