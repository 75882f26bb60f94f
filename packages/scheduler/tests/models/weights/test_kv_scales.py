import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tercet.scheduler.model_files import ModelError
from tercet.scheduler.models.registry import build_model, load_config
from tercet.scheduler.models.weights.kv_scales import read_kv_scales
from tercet.scheduler.models.weights.weights import load_weights

Write = Callable[[dict[str, torch.Tensor]], Path]


@pytest.fixture
def write(checkpoints: Callable[[str], Path], tmp_path: Path) -> Write:
    """A checkpoint with more tensors, named after "model.layers."."""

    def add(tensors: dict[str, torch.Tensor]) -> Path:
        directory = shutil.copytree(checkpoints("llama"), tmp_path / "model")
        more = {f"model.layers.{name}": tensor for name, tensor in tensors.items()}
        save_file(load_file(directory / "model.safetensors") | more, directory / "model.safetensors")
        return directory

    return add


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ("k_scale", "v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
def test_scales_under_every_name(keys: str, values: str, write: Write) -> None:
    tensors = {
        f"0.self_attn.{keys}": torch.tensor(0.5),
        f"0.self_attn.{values}": torch.tensor([0.25]),
        f"2.self_attn.{keys}": torch.tensor([0.125], dtype=torch.bfloat16),
        f"2.self_attn.{values}": torch.tensor(2.0, dtype=torch.float16),
    }
    directory = write(tensors)
    assert read_kv_scales(directory, 3) == {0: (0.5, 0.25), 2: (0.125, 2.0)}
    load_weights(build_model(load_config(directory)), directory)  # where they are not asked for they do no harm


def test_scales_of_what_reads_text_of_a_model_that_reads_images(tmp_path: Path) -> None:
    names = {f"language_model.model.layers.1.self_attn.{name}": torch.tensor(0.5) for name in ("k_scale", "v_scale")}
    save_file({**names, "vision_tower.self_attn.k_scale": torch.tensor(7.0)}, tmp_path / "model.safetensors")
    assert read_kv_scales(tmp_path, 2) == {1: (0.5, 0.5)}


def test_one_scale_for_both(write: Write) -> None:
    assert read_kv_scales(write({"1.self_attn.kv_scale": torch.tensor(0.5)}), 3) == {1: (0.5, 0.5)}


def test_a_checkpoint_without_scales(checkpoints: Callable[[str], Path]) -> None:
    assert read_kv_scales(checkpoints("llama"), 3) == {}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"0.self_attn.kv_scale": torch.ones(2)}, r"kv_scale \[2\]: only one scale for a layer"),
        ({"0.self_attn.kv_scale": torch.tensor(0.0)}, "kv_scale is 0.0, which is no scale"),
        ({"0.self_attn.kv_scale": torch.tensor(torch.nan)}, "kv_scale is nan"),
        ({"0.self_attn.k_scale": torch.tensor(1.0)}, "k_scale belongs to no layer, or has no other half"),
        ({"3.self_attn.kv_scale": torch.tensor(1.0)}, "kv_scale belongs to no layer"),
    ],
)
def test_what_is_no_scale(tensors: dict[str, torch.Tensor], message: str, write: Write) -> None:
    with pytest.raises(ModelError, match=message):
        read_kv_scales(write(tensors), 3)
