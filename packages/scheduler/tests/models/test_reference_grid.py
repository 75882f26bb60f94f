"""Every field of config.json, changed: what is computed equals transformers, or the field is refused by name."""

import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from packages.scheduler.tests.models.reference_grid import (
    BASES,
    LEFT_OUT,
    Grid,
    Outcome,
    base_of,
    changed,
    changes,
    rope_changes,
)
from tercet.scheduler.models.config.field_support import support_of
from tercet.scheduler.models.registry import family_of

LISTS: dict[str, Any] = tomllib.loads(
    (Path(__file__).parents[4] / "tools/reference_fields/transformers-decoders.toml").read_text()
)
pytestmark = pytest.mark.skipif(
    transformers.__version__ != LISTS["transformers"], reason="the lists are of another version of transformers"
)
UNLIKE = {("DeepseekV2ForCausalLM", "norm_topk_prob"): "the family's own code reads it, transformers declares it only"}
HOLDERS = 3
"""Architectures in which an ordinary run changes a field; a slow run changes it in every one that has it."""
ALIKE = {"BambaForCausalLM", "FalconMambaForCausalLM", "Lfm2MoeForCausalLM", "Qwen3_5MoeForCausalLM"}
"""Architectures with the layers of another one, whose fields a slow run alone changes."""
BLAMED = {
    "n_routed_experts": "n_group",
    "n_shared_experts": "shared_experts",
    "num_hidden_layers": "layer_types",
    "num_experts_per_tok": "experts",
    "num_key_value_heads": "k_proj",
    "num_local_experts": "experts",
    "num_experts": "experts",
    "num_shared_experts": "shared_experts",
    "num_mtp_layers": "num_nextn_predict_layers",
    "q_lora_rank": "attention_bias",
    "rotary_dim": "partial_rotary_factor",
}
"""Fields for which the refusal names another that they do not fit, or the tensors that are missing."""


def fields_of(architecture: str, *, shared: bool) -> dict[str, str]:
    """Return the fields that transformers knows, and the source of their defaults."""
    parts = [LISTS["shared"], LISTS[architecture]] if shared else [LISTS[architecture]]
    fields = dict.fromkeys(("is_causal", "per_layer_config", "kv_sharing_modes"), "None")
    for part in parts:
        fields |= dict.fromkeys([*part["read"], *part["aliases"], *part["aliases"].values()], "None")
    for part in parts:
        fields |= part["declared"]
    return fields


def fault_of(found: Outcome, field: str, fate: str | None) -> str:
    """Return what is wrong with an outcome; "" where nothing is."""
    if found.ours is None:
        named = field in found.refusal or BLAMED.get(field, field) in found.refusal
        return "" if named and fate != "without effect" else f"is refused with {found.refusal!r}"
    scale = max(1.0, found.theirs.abs().max().item())
    if found.ours.shape != found.theirs.shape or (found.ours - found.theirs).abs().max().item() > 1e-4 * scale:
        return "is not what transformers computes"
    if fate == "without effect" and not found.same_as_base:
        return "changes what transformers computes"
    return ""


def faults(architecture: str, cases: Iterable[tuple[str, Any]], directory: Path) -> list[str]:
    """Return what is wrong with some changes of one architecture, most of which transformers has to run."""
    grid = Grid(architecture, directory)
    found: list[str] = []
    ran = tried = 0
    for field, value in cases:
        outcome = grid.outcome(changed(grid.base, field, value))
        tried += 1
        if outcome is None:
            continue
        ran += 1
        if (architecture, field) not in UNLIKE and (
            fault := fault_of(outcome, field, support_of(field, family_of(architecture).fields))
        ):
            found.append(f"{field}={'left out' if value is LEFT_OUT else value!r} {fault}")
    assert ran > tried / 3 or tried <= 2
    return found


def one_of_each(cases: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return the first change of each field."""
    first: dict[str, Any] = {}
    for field, value in cases:
        first.setdefault(field, value)
    return first


@cache
def ordinary_cases() -> dict[str, dict[str, Any]]:
    """Return one change of each field in at most `HOLDERS` architectures that have it, by architecture."""
    every = {each: one_of_each(changes(each, fields_of(each, shared=False))) for each in BASES if each not in ALIKE}
    chosen = set[tuple[str, str]]()
    for number, field in enumerate(sorted(set[str]().union(*every.values()))):
        holders = [architecture for architecture, cases in every.items() if field in cases]
        first = number % len(holders)
        chosen |= {(architecture, field) for architecture in [*holders[first:], *holders[:first]][:HOLDERS]}
    return {
        architecture: {field: value for field, value in cases.items() if (architecture, field) in chosen}
        for architecture, cases in every.items()
    } | {each: one_of_each(changes(each, fields_of(each, shared=False))) for each in ALIKE}


@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=pytest.mark.slow) if name in ALIKE else name for name in BASES]
)
def test_a_field_counts_as_in_transformers_or_is_refused_by_name(architecture: str, tmp_path: Path) -> None:
    assert not faults(architecture, ordinary_cases()[architecture].items(), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", BASES)
def test_every_value_counts_as_in_transformers(architecture: str, tmp_path: Path) -> None:
    assert not faults(architecture, changes(architecture, fields_of(architecture, shared=True)), tmp_path)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "DeepseekV3ForCausalLM", "Phi3ForCausalLM"])
def test_rotations_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    grid = Grid(architecture, tmp_path)
    found = []
    for case, config in rope_changes(architecture):
        outcome = grid.outcome(config)
        if outcome is not None and (fault := fault_of(outcome, case.split()[-1], None)):
            found.append(f"{case} {fault}")
    assert not found


@pytest.mark.parametrize("kinds", [["sliding_attention", "full_attention", "sliding_attention"], None])
def test_layers_of_ministral_alternate(kinds: list[str] | None, tmp_path: Path) -> None:
    """Which transformers computes with another class, chosen by `layer_types`."""
    grid = Grid("MistralForCausalLM", tmp_path)
    outcome = grid.outcome(base_of("MistralForCausalLM") | {"layer_types": kinds})
    assert outcome is not None
    assert outcome.ours is not None
    torch.testing.assert_close(outcome.ours, outcome.theirs, atol=1e-4, rtol=0)
    assert outcome.same_as_base is (kinds is None)


def test_what_is_computed_here_is_not_what_a_changed_field_leaves_alone(tmp_path: Path) -> None:
    """The comparison finds a field that is ignored: one that the reference is given and the reader is not."""
    grid = Grid("MistralForCausalLM", tmp_path)
    base, other = grid.outcome(grid.base), grid.outcome(changed(grid.base, "sliding_window", 3))
    assert base is not None
    assert other is not None
    assert fault_of(Outcome(other.theirs, base.ours), "sliding_window", "honoured")
    assert fault_of(Outcome(other.theirs, None, "config.json: hidden_act: is wrong"), "sliding_window", "honoured")
    assert fault_of(Outcome(other.theirs, other.ours), "sliding_window", "without effect")
    assert not fault_of(other, "sliding_window", "honoured")
