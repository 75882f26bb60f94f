"""Tensor names in checkpoints that differ from the module names here.

Projections of the same input are one fused module here. Most checkpoints store them separately, Phi-3's fused.

transformers 5 stores all experts of a layer in one tensor, as they are here. Most checkpoints store three tensors for
each expert, and Mixtral's have other names for these and for the layer. gpt-oss and Llama 4 store all experts in one
tensor, too, but with outputs as the last dimension, and gpt-oss's gates and ups are interleaved: they are reordered
after reading.

Of models that also read images, only the text part is served, and its names have another prefix.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import nn

from tercet.scheduler.model_files import StoredTensor
from tercet.scheduler.models.layers.linear import FusedLinear, MappedRows
from tercet.scheduler.models.layers.moe import ExpertLinear, Experts
from tercet.scheduler.models.layers.recurrent import CausalConv
from tercet.scheduler.models.layers.shard import Cut

_EXPERT = re.compile(r"(.*\.experts\.\d+)\.")
"""The path of an expert at the beginning of the names of its tensors."""
_TEXT = {
    "language_model.": "",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "model.decoder.": "model.",
}
"""Prefixes of text tensors in models that also read images, by transformers 4 and 5, or that read audio, and their
replacement.
"""
_CORRECTION = ".e_score_correction_bias"
"""Suffix of the router's score correction in checkpoints that store it outside the router."""
_VISION = tuple(
    prefix + part
    for prefix in ("", "model.")
    for part in (
        *("vision_tower.", "vision_model.", "visual.", "multi_modal_projector.", "mm_projector.", "embed_vision."),
        *("connector.", "audio_tower.", "embed_audio.", "encoder.", "image_newline"),
    )
)


_LFM2 = {
    ".operator_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    "model.embedding_norm.": "model.norm.",
    ".feed_forward.": ".mlp.",
    ".w1.": ".gate_proj.",
    ".w3.": ".up_proj.",
    ".w2.": ".down_proj.",
    ".self_attn.out_proj.": ".self_attn.o_proj.",
    ".q_layernorm.": ".q_norm.",
    ".k_layernorm.": ".k_norm.",
    ".expert_bias": _CORRECTION,
}
_GRANITE_HYBRID = {
    ".block_sparse_moe.router.layer.": ".mlp.gate.",
    ".block_sparse_moe.input_linear.weight": ".mlp.experts.gate_up_proj",
    ".block_sparse_moe.output_linear.weight": ".mlp.experts.down_proj",
    ".shared_mlp.input_linear.": ".mlp.shared_experts.gate_up_proj.",
    ".shared_mlp.output_linear.": ".mlp.shared_experts.down_proj.",
}
_LLAMA4 = {".feed_forward.shared_expert.": ".mlp.shared_experts.", ".feed_forward.": ".mlp."}
_GEMMA4 = {
    ".router.proj.": ".mlp.gate.",
    ".router.scale": ".mlp.gate_scale",
    ".router.per_expert_scale": ".mlp.expert_scale",
    ".post_feedforward_layernorm_1.": ".mlp.shared_norm.",
    ".post_feedforward_layernorm_2.": ".mlp.experts_norm.",
    ".pre_feedforward_layernorm_2.": ".mlp.experts_input_norm.",
    ".mlp.gate_proj.": ".mlp.shared_experts.gate_proj.",
    ".mlp.up_proj.": ".mlp.shared_experts.up_proj.",
    ".mlp.down_proj.": ".mlp.shared_experts.down_proj.",
    ".experts.": ".mlp.experts.",
}
_PRE_FF = {
    ".pre_ff_layernorm.": ".post_attention_layernorm.",
    ".feed_forward.": ".mlp.",
    "model.final_layernorm.": "model.norm.",
}
_SINGLE = {
    f".mixer.{part}.": f".{name}.{part}."
    for name, parts in (
        ("self_attn", "q_proj k_proj v_proj o_proj"),
        ("mlp", "gate experts shared_experts up_proj down_proj fc1_latent_proj fc2_latent_proj"),
    )
    for part in parts.split()
} | {
    ".mixer.": ".mamba.",
    "backbone.": "model.",
    ".embeddings.": ".embed_tokens.",
    ".embedding.": ".embed_tokens.",
    ".norm_f.": ".norm.",
}
_OLMO_HYBRID = {
    ".attention_layer_norm.": ".input_layernorm.",
    ".feedforward_layer_norm.": ".post_attention_layernorm.",
    ".linear_attn.a_proj.": ".linear_attn.in_proj_a.",
    ".linear_attn.b_proj.": ".linear_attn.in_proj_b.",
    ".linear_attn.g_proj.": ".linear_attn.in_proj_z.",
    ".linear_attn.o_norm.": ".linear_attn.norm.",
}
_KIMI_LINEAR = {
    ".self_attn.forget_gate.": ".self_attn.",
    ".self_attn.o_norm.": ".self_attn.norm.",
    ".block_sparse_moe.": ".mlp.",
    ".w1.": ".gate_proj.",
    ".w3.": ".up_proj.",
    ".w2.": ".down_proj.",
}
_SCHEMES = {
    ".operator_norm.": _LFM2,
    ".mixer.": _SINGLE,
    ".pre_ff_layernorm.": _PRE_FF,
    ".linear_attn.g_proj.": _OLMO_HYBRID,
    ".f_a_proj.": _KIMI_LINEAR,
    ".router.per_expert_scale": _GEMMA4,
    ".feed_forward.": _LLAMA4,
    ".encoder_attn.": {"proj_out.": "lm_head."},
}
"""The names of a family by a part of a name that no later family has."""
_SHARED = {".mlp.shared_experts.": ".mlp."}
"""Names of other families' parts, and the names here. Granite's only MLP has the name of a shared expert."""


_WITH_ENCODER = {
    "decoder.": "model.",
    "lm_head.out_proj.": "lm_head.",
    ".cross_attn.o_proj.": ".cross_attn.out_proj.",
}
_TEXT_ENCODERS = "encoder.layernorm_embedding.", ".pre_cross_attn_layernorm."
"""Parts of names that only models with an encoder of text have."""
_SHARED_EMBEDDINGS = "shared.weight", "decoder.embed_tokens.weight", "encoder.embed_tokens.weight", "lm_head.weight"
"""Names of the embedding of encoder, decoder and head where all are one. A checkpoint has one or several of them."""


def text_names(stored: Collection[str]) -> dict[str, str]:
    """Map each stored name to the name here, without tensors of encoders, except for those of text."""
    if any(part in name for name in stored for part in _TEXT_ENCODERS):
        return _names_with_encoder(stored)
    names = {name: here.replace(".attention_sink_bias", ".sinks") for name, here in _without_images(stored).items()}
    for part, scheme in _SCHEMES.items():
        if any(part in name for name in names.values()):
            return {name: _renamed(here, scheme) for name, here in names.items()}
    if any(".shared_mlp." in name for name in names.values()):
        mixes = any(".block_sparse_moe." in name for name in names.values())
        scheme = _GRANITE_HYBRID if mixes else _GRANITE_HYBRID | _SHARED
        return {name: _renamed(here, scheme) for name, here in names.items()}
    return names


def _names_with_encoder(stored: Collection[str]) -> dict[str, str]:
    """Map each stored name of a model with an encoder of text to the name here."""
    plain = {name: name.removeprefix("model.") for name in stored}
    if any(".encoder_attn." in name for name in stored):  # BART's embeddings are one
        copies = [name for copy in _SHARED_EMBEDDINGS for name, here in plain.items() if here == copy]
        for name in copies:
            del plain[name]
        plain |= dict.fromkeys(copies[:1], "decoder.embed_tokens.weight")
    return {name: _renamed(here, _WITH_ENCODER) for name, here in plain.items()}


_BY_ARCHITECTURE = {
    "BambaForCausalLM": _PRE_FF,
    "FalconH1ForCausalLM": _PRE_FF,
    "GraniteMoeHybridForCausalLM": _GRANITE_HYBRID | _SHARED,
    "KimiLinearForCausalLM": _KIMI_LINEAR,
    "Lfm2ForCausalLM": _LFM2,
    "Lfm2MoeForCausalLM": _LFM2,
    "FalconMambaForCausalLM": _SINGLE,
    "Mamba2ForCausalLM": _SINGLE,
    "MambaForCausalLM": _SINGLE,
    "NemotronHForCausalLM": _SINGLE,
    "OlmoHybridForCausalLM": _OLMO_HYBRID,
}
"""The names of families of which a few layers do not show whose they are."""


def adapter_names(paths: Collection[str], architecture: str) -> dict[str, str]:
    """Map the path of each layer of an adapter to the path here, without layers of encoders."""
    scheme = _BY_ARCHITECTURE.get(architecture)
    if scheme is None:
        return text_names(paths)
    return {path: _renamed(f"{here}.", scheme).removesuffix(".") for path, here in _without_images(paths).items()}


def _renamed(name: str, scheme: Mapping[str, str]) -> str:
    for stored, here in scheme.items():
        name = name.replace(stored, here)
    return name


def _without_images(stored: Collection[str]) -> dict[str, str]:
    """Map each name to that of the text model, without tensors of encoders."""
    stored = list(stored)
    for prefix, here in _TEXT.items():
        if any(name.startswith(prefix) for name in stored):
            kept = (name for name in stored if not name.startswith(_VISION))
            return {name: here + name.removeprefix(prefix) if name.startswith(prefix) else name for name in kept}
    return {name: name for name in stored if not name.startswith(_VISION)}


class Place(NamedTuple):
    """The destination of a stored tensor, and the part of the tensor to read: without cuts, all of it."""

    memory: torch.Tensor
    cut: Cut | None = None
    experts: Cut | None = None
    """The cut of a tensor of all experts."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        shape = tuple(self.memory.shape)
        for cut in (self.experts, self.cut):
            shape = shape if cut is None else cut.stored_shape(shape)
        return shape

    def held(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the part of the tensor that this rank holds."""
        for cut in (self.experts, self.cut):
            stored = stored if cut is None else cut.of(stored)
        return stored


@dataclass(frozen=True)
class FusedNames:
    """The fused projections that a checkpoint stores fused."""

    whole: frozenset[str] = frozenset()
    """Last components of their paths, such as qkv_proj."""

    @classmethod
    def of(cls, stored: Collection[str]) -> "FusedNames":
        """Collect them from the names of a checkpoint's tensors."""
        return cls(frozenset(".".join(name.split(".")[-2:-1]) for name in stored))

    def parts(self, path: str, linear: FusedLinear) -> dict[str, Cut]:
        """Return the stored names of the projection at `path`, in the order of its rows, with the rows held of each."""
        parent, _, name = path.rpartition(".")
        if name in self.whole:
            return {path: Cut.stacked([*linear.parts.values()])}
        return {f"{parent}.{part}": rows for part, rows in linear.parts.items()}


def convolution_parts(path: str, conv: CausalConv, stored: Mapping[str, StoredTensor]) -> dict[str, Cut]:
    """Return the stored names of the convolution at `path`, in the order of its channels, with those held of each.

    Those that transformers saves are of equal size.
    """
    parent, channels = path.rpartition(".")[0], conv.channels
    if not conv.parts or f"{path}.weight" in stored:
        return {path: channels}
    parts = {f"{parent}.{part}": count for part, count in conv.parts.items()}
    if all(f"{name}.weight" in stored for name in parts):
        found = {name: stored[f"{name}.weight"].shape[0] for name in parts}
        parts = found if sum(found.values()) == channels.whole else parts
    ends = [*accumulate(parts.values())]
    return {name: channels.within(end - parts[name], parts[name]) for name, end in zip(parts, ends, strict=True)}


@dataclass(frozen=True)
class ExpertNames:
    """The naming scheme of experts in a checkpoint."""

    mlp: str = "mlp"
    parts: tuple[str, str, str] | None = ("gate_proj", "up_proj", "down_proj")
    """Names of one expert's projections; None if all experts are in one tensor."""
    router: str = "gate"
    correction: str = ".gate.e_score_correction_bias"
    """Suffix of the name of the router's score correction."""
    transposed: bool = False
    """Unquantized weights are stored with outputs as the last dimension."""
    interleaved: bool = False
    """Gates and ups are stored interleaved."""

    @classmethod
    def of(cls, stored: Mapping[str, StoredTensor]) -> "ExpertNames":
        """Detect the scheme from the names and shapes of a checkpoint's tensors."""
        ends = tuple(f".{end}" for end in ("mlp.router.weight", "mlp.router.bias", "experts.gate_up_proj_blocks"))
        found = {end for name in stored for end in ends if name.endswith(end)}
        if found and any(".experts.0." in name for name in stored):
            return cls(router="router")
        if found:
            return cls(parts=None, router="router", transposed=True, interleaved=found != {ends[0]})
        beside = any(name.endswith((".mlp" + _CORRECTION, ".block_sparse_moe" + _CORRECTION)) for name in stored)
        correction = _CORRECTION if beside else cls.correction
        for name in stored:
            if name.endswith((".experts.gate_up_proj", ".experts.up_proj")):
                return cls(parts=None, correction=correction, transposed=_outputs_last(name, stored))
            if ".block_sparse_moe." in name:
                return cls("block_sparse_moe", ("w1", "w3", "w2"), correction=correction)
        return cls(correction=correction)

    def parameter(self, path: str, kind: str) -> str:
        """Return the stored name of a parameter of the module at `path`."""
        return f"{path}.{kind}".removeprefix(".").replace(type(self).correction, self.correction)

    def modules(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Yield every module of a model with its path in the checkpoint."""
        for path, module in model.named_modules():
            stored = f"{path}.".replace(".mlp.gate.", f".mlp.{self.router}.").replace(".mlp.", f".{self.mlp}.")
            yield stored.removesuffix("."), module

    def tensors(self, path: str, experts: Experts) -> dict[str, Place]:
        """Map each tensor of the experts at `path` to its destination.

        If all experts are in one tensor, quantized weights without memory yet are left out: another function reads
        them.
        """
        if self.parts is None:
            return self._in_one(path, experts)
        places: dict[str, Place] = {}
        for linear, dim in ((experts.gate_up_proj, 0), (experts.down_proj, 1)):
            cut = experts.columns.along(dim)
            rows = self.rows(path, experts, linear)
            places |= {f"{prefix}.weight": Place(row, cut) for prefix, row in rows.items()}
        return places

    def _in_one(self, path: str, experts: Experts) -> dict[str, Place]:
        """Do the same if all experts are in one tensor."""
        gate_up, down = experts.gate_up_proj, experts.down_proj
        rows, columns = self.gate_up_rows(experts).along(1), experts.columns.along(2)
        places: dict[str, Place] = {}
        for name, linear, cut in ((_joint_name(gate_up), gate_up, rows), ("down_proj", down, columns)):
            if linear.bias is not None:
                places[f"{path}.{name}_bias"] = Place(linear.bias.data, cut if linear is gate_up else None, experts.cut)
            if linear.weight.is_meta:
                continue
            memory, cut = (
                (linear.weight.data.mT, cut.along(3 - cut.dim)) if self.transposed else (linear.weight.data, cut)
            )
            places[f"{path}.{name}"] = Place(memory, cut, experts.cut)
        return places

    def gate_up_rows(self, experts: Experts) -> Cut:
        """Return the rows of one expert's stored gate-and-up tensor that this rank holds."""
        columns = experts.columns
        if self.interleaved:
            return Cut(2 * columns.whole, tuple(range(2 * run.start, 2 * run.stop) for run in columns.runs))
        return columns if experts.gate_up_proj.runs == 1 else columns.stacked_below(columns)

    def rows(self, path: str, experts: Experts, linear: ExpertLinear) -> dict[str, torch.Tensor]:
        """Map each stored part of `linear` in the experts at `path` to its memory [outputs, inputs].

        The order is that of memory: expert after expert, gate before up.
        """
        names = self._parts_of(experts, linear)
        result: dict[str, torch.Tensor] = {}
        for number, weight in zip(experts.held, linear.weight.data, strict=True):
            rows = weight.chunk(linear.runs)
            result |= {f"{path}.{number}.{name}": row for name, row in zip(names, rows, strict=True)}
        return result

    def _parts_of(self, experts: Experts, linear: ExpertLinear) -> tuple[str, ...]:
        """Return the stored parts of `linear`; without a gate, it has the up projection alone."""
        gate, up, down = self.parts or ("", "", "")
        return (gate, up)[-linear.runs :] if linear is experts.gate_up_proj else (down,)

    def mapped_targets(self, path: str, experts: Experts) -> dict[str, Callable[[MappedRows], None]]:
        """Map each stored weight of the experts at `path` to the call that lends it to its linear."""
        if self.parts is None:
            return {
                f"{path}.{name}": partial(self._set_all_mapped, linear)
                for name, linear in (
                    (_joint_name(experts.gate_up_proj), experts.gate_up_proj),
                    ("down_proj", experts.down_proj),
                )
            }
        return {
            f"{path}.{number}.{name}.weight": partial(linear.set_mapped, index, run)
            for index, number in enumerate(experts.held)
            for linear in (experts.gate_up_proj, experts.down_proj)
            for run, name in enumerate(self._parts_of(experts, linear))
        }

    def of_other_ranks(self, model: nn.Module) -> set[str]:
        """Return the path of each expert that other ranks hold and this one does not."""
        return {
            f"{path}.{number}"
            for path, module in self.modules(model)
            if isinstance(module, Experts)
            for number in {*range(module.cut.whole)}.difference(module.held)
        }

    def _set_all_mapped(self, linear: ExpertLinear, mapped: MappedRows) -> None:
        if self.transposed and isinstance(mapped.rows, torch.Tensor):
            mapped = mapped._replace(rows=mapped.rows.transpose(1, 2))
        linear.set_all_mapped(mapped, interleaved=self.interleaved)

    def deinterleave(self, model: nn.Module) -> None:
        """Move gates before ups in biases and unquantized weights that were read interleaved.

        Lent weights are reordered when they are taken.
        """
        for module in model.modules() if self.interleaved else ():
            if isinstance(module, Experts):
                linear = module.gate_up_proj
                weight = None if linear.is_mapped else linear.weight.data
                for tensor in (weight, None if linear.bias is None else linear.bias.data):
                    for rows in () if tensor is None or tensor.is_meta else tensor:
                        rows.copy_(deinterleaved(rows))


def without_experts(header: Mapping[str, StoredTensor], absent: Collection[str]) -> dict[str, StoredTensor]:
    """Return the tensors of a file, by name, without those of the experts at the paths in `absent`."""
    found = ((name, tensor, _EXPERT.match(name)) for name, tensor in header.items())
    return {name: tensor for name, tensor, path in found if path is None or path[1] not in absent}


def _outputs_last(gate_up: str, stored: Mapping[str, StoredTensor]) -> bool:
    """Return whether outputs are the last dimension of the tensors of all experts, as in Qwen3-VL's checkpoints."""
    down = stored.get(f"{gate_up.rpartition('.')[0]}.down_proj")
    return down is not None and len(down.shape) == 3 and stored[gate_up].shape[-1] != down.shape[1]


def _joint_name(gate_up: ExpertLinear) -> str:
    """Return the stored name of the tensor of all experts' gate and up projections, or of the latter alone."""
    return "gate_up_proj" if gate_up.runs == 2 else "up_proj"


def deinterleaved(rows: torch.Tensor) -> torch.Tensor:
    """Deinterleave rows [2 * size, ...] of gates and ups into gates before ups."""
    return torch.cat([rows[::2], rows[1::2]])
