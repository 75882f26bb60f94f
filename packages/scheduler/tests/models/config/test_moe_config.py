"""Routers that score as DeepSeek's do."""

import importlib
from typing import Any

import pytest
import torch

from tercet.kernels.ops.moe import route
from tercet.scheduler.model_files import ModelError
from tercet.scheduler.models.config.config_fields import Fields
from tercet.scheduler.models.config.moe_config import MoeConfig, parse_moe
from tercet.scheduler.models.registry import family_of

DOTS = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2}


def parsed(architecture: str, fields: dict[str, Any], layers: int) -> MoeConfig | None:
    return parse_moe(Fields(fields), family_of(architecture).moe, layers)


GROUPS_BY_THEIR_BEST = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("DeepseekV2", {"num_experts_per_tok": 6}),
        ("DeepseekV2", {"num_experts_per_tok": 6, **GROUPS_BY_THEIR_BEST}),
        ("DeepseekV3", {}),
        ("Dots1", DOTS),
        ("Glm4Moe", {}),
        ("Glm4MoeLite", {}),
        ("MiniMaxM2", {}),
    ],
)
def test_routers_of_scores_are_those_of_transformers(name: str, told: dict[str, Any]) -> None:
    import transformers

    theirs = getattr(transformers, f"{name}Config")(num_hidden_layers=5, **told)
    moe = parsed(f"{name}ForCausalLM", {"intermediate_size": theirs.intermediate_size, **told}, 5)
    assert moe is not None
    module = importlib.import_module(theirs.__class__.__module__.replace("configuration", "modeling"))
    router = getattr(module, f"{name}TopKRouter" if name == "MiniMaxM2" else f"{name}TopkRouter")(theirs)
    torch.manual_seed(0)
    x, weight = torch.randn(20, theirs.hidden_size), torch.randn(moe.experts, theirs.hidden_size) / 64
    router.weight.data.copy_(weight)
    correction = torch.randn(moe.experts) / 10 if moe.has_correction else None
    if hasattr(router, "e_score_correction_bias"):
        router.e_score_correction_bias.copy_(correction)
    logits, weights, experts = router(x, correction) if name == "MiniMaxM2" else router(x)
    actual, chosen = route(logits, moe.routing, correction)
    assert torch.equal(chosen.sort(-1).values, experts.sort(-1).values)
    torch.testing.assert_close(actual.sort(-1).values, weights.sort(-1).values, rtol=1e-5, atol=1e-7)
    dense = getattr(theirs, "first_k_dense_replace", int(name == "Glm4MoeLite"))
    assert moe.layers == tuple(layer >= dense for layer in range(5))
    assert moe.shared_size == getattr(theirs, "n_shared_experts", 0) * moe.intermediate_size
    assert moe.intermediate_size == getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
    assert moe.gates_shared is (name == "MiniMaxM2")


def test_weights_of_deepseek_v2_that_add_up_to_one_are_not_scaled() -> None:
    """So its authors' code has it, which transformers leaves out."""
    told = {"num_experts_per_tok": 6, "norm_topk_prob": True, "routed_scaling_factor": 16.0}
    moe = parsed("DeepseekV2ForCausalLM", told, 2)
    assert moe is not None
    assert (moe.routing.renormalize, moe.routing.scale) == (True, 1.0)


def test_which_layers_of_deepseek_have_experts() -> None:
    def layers(**told: Any) -> tuple[bool, ...]:
        moe = parsed("DeepseekV3ForCausalLM", told, 4)
        return moe.layers if moe else ()

    assert layers() == (False, False, False, True)
    assert layers(first_k_dense_replace=1, moe_layer_freq=2) == (False, False, True, False)
    assert layers(mlp_layer_types=["sparse", "dense", "dense", "sparse"]) == (True, False, False, True)
    assert layers(first_k_dense_replace=4) == ()


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("Dots1ForCausalLM", {"n_routed_experts": None}, "n_routed_experts: is missing"),
        ("Dots1ForCausalLM", {"scoring_func": "softmax"}, "scoring_func: 'softmax' is not supported, only sigmoid"),
        ("Dots1ForCausalLM", {"topk_method": "greedy"}, "topk_method: 'greedy' is not supported"),
        ("Dots1ForCausalLM", {"n_group": 3}, "n_group: 8 experts are no 3 groups"),
        ("Dots1ForCausalLM", {"n_group": 8}, "n_group: 8 experts are no 8 groups"),
        ("Dots1ForCausalLM", {"n_group": 2, "topk_group": 3}, "topk_group: 3 is more than the 2 groups"),
        ("Dots1ForCausalLM", {"n_group": 4, "num_experts_per_tok": 3}, "num_experts_per_tok: 3 is more than the 2"),
        ("Dots1ForCausalLM", {"mlp_layer_types": ["dense"]}, "mlp_layer_types: must say dense or sparse for each"),
        ("Dots1ForCausalLM", {"routed_scaling_factor": 0}, "routed_scaling_factor: 0 is not a positive number"),
        ("DeepseekV2ForCausalLM", {"topk_method": "noaux_tc"}, "topk_method: 'noaux_tc' is not supported"),
        ("MiniMaxM2ForCausalLM", {"scoring_func": "softmax"}, "scoring_func: 'softmax' is not supported, only sigmoid"),
    ],
)
def test_routers_that_cannot_be(architecture: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parsed(architecture, {**DOTS, **changes}, 2)
