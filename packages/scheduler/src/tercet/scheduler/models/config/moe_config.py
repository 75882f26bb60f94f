"""The config.json fields of mixtures of experts."""

from dataclasses import dataclass

from tercet.kernels.ops.activation import LIMIT, SLOPE, Gate
from tercet.kernels.ops.moe import Routing, Score
from tercet.scheduler.models.config.config_fields import Fields, wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Layers in which a router chooses a few of many MLPs for each token."""

    experts: int
    routing: Routing
    """The router's parameters."""
    intermediate_size: int
    """Intermediate size of each expert's MLP."""
    shared_size: int
    """Intermediate size of the shared expert, which processes every token; 0 if there is none."""
    layers: tuple[bool, ...]
    """For each layer, whether it has experts; the others have one MLP."""
    gate: Gate | None = "silu"
    """The activation of every expert's gate; None: experts, and the shared one, are `SquaredReLUMLP`s."""
    latent_size: int | None = None
    """Elements of the vectors that experts compute with; None: the hidden size."""
    bias: bool = False
    """Router and experts have biases."""
    gates_shared: bool = True
    """The shared expert has a gate."""
    has_correction: bool = False
    """The checkpoint has a correction that is added to scores to choose experts (see `route`)."""
    float32_router: bool = False
    """The router computes in float32 for every dtype of the model."""
    scales_inputs: bool = False
    """Weights of experts multiply their inputs, not their outputs."""


@dataclass(frozen=True, kw_only=True)
class MoeDefaults:
    """transformers' defaults of a family."""

    experts: int
    top_k: int
    size: tuple[str, int] | None = None
    """The field of an expert's size and its default; None: the size of any MLP."""
    shared_size: int = 0
    renormalizes: bool = False
    """Always, without a field for it."""
    chooses_layers: bool = False
    gate: Gate = "silu"
    bias: bool = False
    score: Score = "softmax"
    """Routers with sigmoid scores have a correction and compute in float32."""


@dataclass(frozen=True, kw_only=True)
class DeepSeekMoeDefaults:
    """transformers' defaults of a family with DeepSeek's fields: shared experts form one MLP of their total size,
    ungated.
    """

    experts: int | None
    """None: the field is required, as for `top_k` and `shared`."""
    top_k: int | None
    size: int
    shared: int | None
    dense: int
    """Number of first layers without experts."""
    renormalizes: bool
    scale: float = 1.0
    groups: tuple[int, int] = (1, 1)
    """Number of groups, and of groups chosen per token."""
    score: Score = "sigmoid"


def parse_moe(fields: Fields, family: MoeDefaults | DeepSeekMoeDefaults | None, layers: int) -> MoeConfig | None:
    """Parse the experts of a model; return None if no layer has any. Raise ModelError."""
    if family is None:
        return None
    if isinstance(family, DeepSeekMoeDefaults):
        return _parse_deepseek(fields, family, layers)
    sparse = _sparse_layers(fields, layers) if family.chooses_layers else (True,) * layers
    if not any(sparse):
        return None
    experts = fields.count("num_experts", family.experts)
    top_k = fields.count("num_experts_per_tok", family.top_k)
    if top_k > experts:
        raise wrong("num_experts_per_tok", f"{top_k} is more than the {experts} experts")
    for name, only in (("swiglu_limit", LIMIT), ("swiglu_alpha", SLOPE)) if family.gate == "clamped" else ():
        if fields.number(name, only) != only:
            raise wrong(name, f"only {only} is supported")
    return MoeConfig(
        experts=experts,
        routing=Routing(
            top_k=top_k,
            score=_score(fields, family.score),
            renormalize=family.renormalizes or fields.flag("norm_topk_prob"),
        ),
        intermediate_size=fields.count(*(family.size or ("intermediate_size",))),
        shared_size=fields.count("shared_expert_intermediate_size", family.shared_size) if family.shared_size else 0,
        layers=sparse,
        gate=family.gate,
        bias=family.bias,
        has_correction=family.score == "sigmoid",
        float32_router=family.score == "sigmoid",
    )


def _parse_deepseek(fields: Fields, family: DeepSeekMoeDefaults, layers: int) -> MoeConfig | None:
    sparse = _layers_after(fields, family.dense, layers)
    if not any(sparse):
        return None
    experts = _count(fields, "n_routed_experts", family.experts)
    shared = _count(fields, "n_shared_experts", family.shared, least=0)
    size = fields.count("moe_intermediate_size", family.size)
    return MoeConfig(
        experts=experts,
        routing=_deepseek_routing(fields, family, experts),
        intermediate_size=size,
        shared_size=shared * size,
        layers=sparse,
        gates_shared=False,
        has_correction=family.score == "sigmoid",
        float32_router=True,
    )


def _deepseek_routing(fields: Fields, family: DeepSeekMoeDefaults, experts: int) -> Routing:
    """Parse the routing. V2 has groups only if set, and does not scale weights that are normalized."""
    likely = family.score == "softmax"
    method = fields.values.get("topk_method") or ("greedy" if likely else "noaux_tc")
    if method not in (("greedy", "group_limited_greedy") if likely else ("noaux_tc",)):
        raise wrong("topk_method", f"{method!r} is not supported")
    groups, top_groups = 1, 1
    if method != "greedy":
        groups, top_groups = fields.count("n_group", family.groups[0]), fields.count("topk_group", family.groups[1])
    top_k = _count(fields, "num_experts_per_tok", family.top_k)
    best = 1 if likely else 2
    if experts % groups or (groups > 1 and experts // groups < best):
        raise wrong("n_group", f"{experts} experts are no {groups} groups")
    if top_groups > groups:
        raise wrong("topk_group", f"{top_groups} is more than the {groups} groups")
    if top_k > (within := experts // groups * top_groups):
        raise wrong("num_experts_per_tok", f"{top_k} is more than the {within} experts")
    renormalizes = fields.flag("norm_topk_prob", family.renormalizes)
    return Routing(
        top_k=top_k,
        score=_score(fields, family.score),
        renormalize=renormalizes,
        scale=1.0 if likely and renormalizes else fields.number("routed_scaling_factor", family.scale),
        groups=groups,
        top_groups=top_groups,
        group_best=best,
    )


def _score(fields: Fields, score: Score) -> Score:
    """Return the family's score function. Raise ModelError if a config has another."""
    if (said := fields.values.get("scoring_func") or score) != score:
        raise wrong("scoring_func", f"{said!r} is not supported, only {score}")
    return score


def _count(fields: Fields, name: str, default: int | None, least: int = 1) -> int:
    return fields.count(name, least=least) if default is None else fields.count(name, default, least=least)


def _layers_after(fields: Fields, dense: int, layers: int) -> tuple[bool, ...]:
    """Return every `moe_layer_freq`th layer after the first `first_k_dense_replace`, or those in `mlp_layer_types`."""
    kinds = fields.values.get("mlp_layer_types")
    if kinds is None:
        first, step = fields.count("first_k_dense_replace", dense, least=0), fields.count("moe_layer_freq", 1)
        return tuple(layer >= first and layer % step == 0 for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in ("dense", "sparse") for kind in kinds):
        raise wrong("mlp_layer_types", f"must say dense or sparse for each of the {layers} layers")
    return tuple(kind == "sparse" for kind in kinds)


def _sparse_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Return every `decoder_sparse_step`th layer, except those in `mlp_only_layers`."""
    step = fields.count("decoder_sparse_step", 1)
    dense = fields.layer_list("mlp_only_layers") or []
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(layers))
