"""What is a mixture's own; that it equals transformers is in test_families."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from packages.scheduler.tests.loaded_model import logits
from tercet.scheduler.model_files import ModelError
from tercet.scheduler.models.layers.layer_ops import TorchLayerOps, set_ops
from tercet.scheduler.models.layers.layers import GatedMLP
from tercet.scheduler.models.layers.moe import MixtureOfExperts
from tercet.scheduler.models.registry import build_model, load_config
from tercet.scheduler.models.weights.weights import dummy_weights, load_weights

Checkpoints = Callable[[str], Path]


def test_layers_are_what_the_config_says(checkpoints: Checkpoints) -> None:
    def kinds(name: str) -> list[type]:
        model = build_model(load_config(checkpoints(name)), "meta")
        return [type(layer.mlp) for layer in model.model.layers]

    assert kinds("qwen3_moe") == [MixtureOfExperts, GatedMLP, MixtureOfExperts]
    assert kinds("qwen2_moe") == [GatedMLP, MixtureOfExperts, GatedMLP]
    assert kinds("mixtral") == [MixtureOfExperts] * 3


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3_moe", {"top_k": 2}),
        ("qwen3_moe", {"renormalize": False}),
        *(("glm4_moe", change) for change in ({"score": "softmax"}, {"scale": 1.0}, {"groups": 1, "top_groups": 1})),
        ("glm4_moe", {"group_best": 1}),
    ],
)
def test_what_transformers_was_equalled_in_counts(name: str, changes: dict[str, Any], checkpoints: Checkpoints) -> None:
    """The checkpoint does tell a model that chooses or weighs otherwise."""
    directory = checkpoints(name)
    right = build_model(load_config(directory))
    assert right.config.moe is not None
    moe = right.config.moe
    wrong = build_model(replace(right.config, moe=replace(moe, routing=replace(moe.routing, **changes))))
    for model in (right, wrong):
        load_weights(model, directory)
    assert (logits(right) - logits(wrong)).abs().max() > 0.1


def test_the_correction_counts(checkpoints: Checkpoints) -> None:
    model = build_model(load_config(checkpoints("dots1")))
    load_weights(model, checkpoints("dots1"))
    right = logits(model)
    for layer in model.model.layers:
        if isinstance(mixture := layer.mlp, MixtureOfExperts):
            assert mixture.gate.e_score_correction_bias is not None
            mixture.gate.e_score_correction_bias.data.zero_()
    assert (right - logits(model)).abs().max() > 0.1


def test_layers_that_guess_ahead_are_left_out(checkpoints: Checkpoints, tmp_path: Path) -> None:
    directory = shutil.copytree(checkpoints("glm4_moe"), tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    save_file({**tensors, "model.layers.3.eh_proj.weight": torch.zeros(48, 96)}, directory / "model.safetensors")
    model = build_model(load_config(directory))
    load_weights(model, directory)
    with pytest.raises(ModelError, match=r"unexpected: model\.layers\.3\.eh_proj\.weight"):
        load_weights(build_model(replace(model.config, mtp_layers=0)), directory)


def test_experts_go_through_the_operations_passed_in(checkpoints: Checkpoints) -> None:
    class Counting(TorchLayerOps):
        shapes: list[list[int]] = []  # noqa: RUF012

        def fused_moe(self, *given: Any, **_: Any) -> torch.Tensor:
            Counting.shapes.append([len(each) for each in given])
            return torch.zeros_like(given[0])

    model = build_model(load_config(checkpoints("qwen2_moe")))
    load_weights(model, checkpoints("qwen2_moe"))
    set_ops(model, Counting())
    logits(model)
    assert Counting.shapes == [[40, 40, 40, 6, 6]]


def test_dummy_weights(checkpoints: Checkpoints) -> None:
    model = build_model(load_config(checkpoints("qwen2_moe")))
    dummy_weights(model)
    layer: Any = model.model.layers[1]
    experts = layer.mlp.experts
    assert 0.019 < experts.gate_up_proj.weight.std() < 0.021
    assert not torch.equal(experts.down_proj.weight[0], experts.down_proj.weight[1])
    assert logits(model).isfinite().all()


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        (
            "mixtral",
            lambda tensors: tensors.pop("model.layers.1.block_sparse_moe.experts.3.w2.weight"),
            r"missing: model\.layers\.1\.block_sparse_moe\.experts\.3\.w2\.weight$",
        ),
        (
            "qwen3_moe",
            lambda tensors: tensors.update({"model.layers.0.mlp.experts.6.up_proj.weight": torch.zeros(32, 48)}),
            r"unexpected: model\.layers\.0\.mlp\.experts\.6\.up_proj\.weight$",
        ),
        (
            "olmoe",
            lambda tensors: tensors.update({"model.layers.0.mlp.experts.5.down_proj.weight": torch.zeros(24, 48)}),
            r"wrong shape: .*experts\.5\.down_proj\.weight \[24, 48\] instead of \[48, 24\]$",
        ),
        (
            "mixtral/fused",
            lambda tensors: tensors.update({"model.layers.2.mlp.experts.gate_up_proj": torch.zeros(4, 80, 48)}),
            r"wrong shape: .*experts\.gate_up_proj \[4, 80, 48\] instead of \[5, 80, 48\]$",
        ),
    ],
)
def test_what_does_not_fit_is_named_as_the_checkpoint_names_it(
    name: str, edit: Callable[[dict[str, torch.Tensor]], object], message: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    directory = shutil.copytree(checkpoints(name), tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        load_weights(build_model(load_config(directory)), directory)
