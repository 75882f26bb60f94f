"""What a config.json says of a mixture of experts."""

from dataclasses import dataclass

from tercet.kernels.ops.activation import LIMIT, SLOPE, Gate
from tercet.scheduler.executor.config_fields import Fields, wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Layers in which a router chooses a few of many MLPs for each token."""

    experts: int
    top_k: int
    intermediate_size: int
    """Of each expert."""
    shared_size: int
    """Intermediate size of one more expert, which every token goes through; 0 where there is none."""
    renormalise: bool
    """Whether the weights of a token's experts add up to 1."""
    layers: tuple[bool, ...]
    """Which layers are such; the others have one MLP."""
    gate: Gate = "silu"
    """Of each expert."""
    bias: bool = False
    """Whether router and experts have biases."""


@dataclass(frozen=True)
class _Family:
    """What transformers takes for fields that a config leaves out."""

    experts: int
    top_k: int
    size: tuple[str, int] | None = None
    """The field with an expert's size; without one that of any MLP."""
    shared_size: int = 0
    renormalises: bool = False
    """Always, without a field that says so."""
    chooses_layers: bool = False
    gate: Gate = "silu"
    bias: bool = False


_FAMILIES = {
    "GptOssForCausalLM": _Family(128, 4, renormalises=True, gate="clamped", bias=True),
    "MixtralForCausalLM": _Family(8, 2, renormalises=True),
    "OlmoeForCausalLM": _Family(64, 8),
    "Qwen2MoeForCausalLM": _Family(60, 4, ("moe_intermediate_size", 1408), 5632, chooses_layers=True),
    "Qwen3MoeForCausalLM": _Family(128, 8, ("moe_intermediate_size", 768), chooses_layers=True),
}


def parse_moe(fields: Fields, architecture: str, layers: int) -> MoeConfig | None:
    """The experts of a model; None for one that has none in any layer. Raises ModelError."""
    family = _FAMILIES.get(architecture)
    if family is None:
        return None
    sparse = _sparse_layers(fields, layers) if family.chooses_layers else (True,) * layers
    if not any(sparse):
        return None
    experts = fields.count("num_local_experts" if fields.has("num_local_experts") else "num_experts", family.experts)
    top_k = fields.count("num_experts_per_tok", family.top_k)
    if top_k > experts:
        raise wrong("num_experts_per_tok", f"{top_k} is more than the {experts} experts")
    for name, only in (("swiglu_limit", LIMIT), ("swiglu_alpha", SLOPE)) if family.gate == "clamped" else ():
        if fields.number(name, only) != only:
            raise wrong(name, f"only {only} is supported")
    return MoeConfig(
        experts=experts,
        top_k=top_k,
        intermediate_size=fields.count(*(family.size or ("intermediate_size",))),
        shared_size=fields.count("shared_expert_intermediate_size", family.shared_size) if family.shared_size else 0,
        renormalise=family.renormalises or fields.flag("norm_topk_prob"),
        layers=sparse,
        gate=family.gate,
        bias=family.bias,
    )


def _sparse_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Every `decoder_sparse_step`th layer, but for those of `mlp_only_layers`."""
    step = fields.count("decoder_sparse_step", 1)
    dense = fields.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise wrong("mlp_only_layers", f"{dense!r} is not a list of layers")
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(layers))
