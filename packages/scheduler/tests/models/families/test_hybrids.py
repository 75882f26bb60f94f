"""Logits of models with recurrent layers against transformers; `generation` has them in batches."""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from packages.scheduler.tests.conftest import HYBRID_VARIANTS, HYBRIDS, make_checkpoint
from packages.scheduler.tests.models.families.test_families import Paged, expected, load, some_tokens
from tercet.kernels.native.library import load_library, missing_library
from tercet.kernels.ops.recurrent import Segment, Segments
from tercet.scheduler.executor.kv_budget import state_layers
from tercet.scheduler.executor.state_pool import StatePool
from tercet.scheduler.model_files import ModelError
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.layers.packed import Packed
from tercet.scheduler.models.native_linear import use_native_projections
from tercet.scheduler.models.registry import build_model, load_config, parse_config
from tercet.scheduler.models.weights.weights import load_weights
from tercet.scheduler.testing.quantized_checkpoints import Grain, quantization_config

Checkpoints = Callable[[str], Path]
Reference = Callable[..., Any]
CPU = torch.device("cpu")
ROUNDING = [name for name in HYBRIDS if name.startswith(("qwen3", "olmo", "kimi")) or name == "mamba"]
"""Those whose states multiply the rounding of float32."""
MODELS = [name for name in (*HYBRIDS, *HYBRID_VARIANTS) if name not in ROUNDING]


class Prompt(Packed):
    """One prompt, whose states begin empty."""

    def __init__(self, ids: torch.Tensor, config: ModelConfig) -> None:
        super().__init__(ids, None, [len(ids)], causal=True)
        self._states = StatePool(state_layers(config), 1, 0, CPU)

    def states_of(self, layer_id: int) -> tuple[tuple[torch.Tensor, ...], Segments]:
        return self._states.layer(layer_id), Segments(torch.empty(0, dtype=torch.int64), [Segment(0, 41, 0)])


@torch.inference_mode()
def distance(directory: Path, reference: Reference, of: Path | None = None) -> float:
    """Largest difference of the logits of a prompt from those of transformers, of another directory if given."""
    model = build_model(load_config(directory))
    load_weights(model, directory)
    ids = torch.randint(0, 389, (41,), generator=torch.Generator().manual_seed(1))
    batch = Prompt(ids, model.config)
    logits = model.compute_logits(model(ids, batch.positions, batch))
    wanted = reference(of or directory)(ids[None]).logits[0]
    return float((logits - wanted).abs().max())


@pytest.mark.parametrize("name", [*MODELS, "nemotron_h/fused"])
def test_a_whole_prompt(name: str, checkpoints: Checkpoints, reference: Reference) -> None:
    assert distance(checkpoints(name), reference) < 1e-4


@pytest.mark.parametrize("name", ROUNDING)
def test_a_whole_prompt_of_small_weights(name: str, reference: Reference, tmp_path: Path) -> None:
    directory, tokens = make_checkpoint(name, tmp_path, initializer_range=0.08), some_tokens(41, 1)
    [logits] = Paged(load(directory), 1).step((0, tokens))
    torch.testing.assert_close(logits, expected(reference(directory), tokens), atol=1e-4, rtol=0)


@torch.inference_mode()
def logits_of(directory: Path, dtype: str, *, native: bool) -> torch.Tensor:
    model = build_model(load_config(directory, dtype))
    load_weights(model, directory)
    if native:
        use_native_projections(model, load_library())
    ids = torch.randint(0, 389, (41,), generator=torch.Generator().manual_seed(1))
    batch = Prompt(ids, model.config)
    return model.compute_logits(model(ids, batch.positions, batch)).float()


@pytest.mark.skipif(bool(missing_library()), reason="no native library")
@pytest.mark.parametrize("name", [name for name in (*HYBRIDS, *HYBRID_VARIANTS) if not name.startswith("kimi")])
def test_native_kernels_compute_what_torch_computes(name: str, checkpoints: Checkpoints) -> None:
    exact = logits_of(checkpoints(name), "float32", native=False)

    def error(dtype: str, *, native: bool) -> float:
        return float((logits_of(checkpoints(name), dtype, native=native) - exact).abs().mean())

    assert error("float32", native=True) < 1e-3
    assert error("bfloat16", native=True) < 1.5 * error("bfloat16", native=False)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("falcon_h1", {"time_step_limit": [0.3, 0.9]}),  # of prompts: transformers has no limits when it decodes
        ("mamba2", {"time_step_limit": [0.4, math.inf]}),
        ("falcon_h1_normed", {"mamba_norm_before_gate": False}),
    ],
)
def test_other_fields(
    name: str, changes: dict[str, Any], checkpoints: Checkpoints, reference: Reference, tmp_path: Path
) -> None:
    directory = shutil.copytree(checkpoints(name), tmp_path / name)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    assert distance(directory, reference) < 1e-4 < distance(directory, reference, checkpoints(name))


@pytest.mark.parametrize("name", ["falcon_h1", "nemotron_h"])
def test_weights_in_fp8(name: str, checkpoints: Checkpoints, reference: Reference, tmp_path: Path) -> None:
    """All projections but routers, with a scale for each output, as llm-compressor writes them."""
    full, quantized = (shutil.copytree(checkpoints(name), tmp_path / kind) for kind in ("full", "quantized"))
    weights = load_file(full / "model.safetensors")
    stored = dict(weights)
    for tensor in [each for each in weights if each.endswith("proj.weight")]:
        scale = weights[tensor].abs().amax(1, keepdim=True) / 448
        stored[tensor] = (weights[tensor] / scale).to(torch.float8_e4m3fn)
        stored[f"{tensor}_scale"] = scale
        weights[tensor] = stored[tensor].float() * scale
    save_file(weights, full / "model.safetensors", {"format": "pt"})
    save_file(stored, quantized / "model.safetensors")
    config = json.loads((full / "config.json").read_text())
    config["quantization_config"] = quantization_config("channel", Grain())
    (quantized / "config.json").write_text(json.dumps(config))
    assert distance(quantized, reference, full) < 1e-3


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_model_is_on_its_device_whole(name: str, checkpoints: Checkpoints) -> None:
    model = build_model(load_config(checkpoints(name)), "meta")
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}


@pytest.mark.parametrize(
    ("name", "changes", "fault"),
    [
        ("falcon_h1", {"mlp_multipliers": [1.0]}, "mlp_multipliers: must have 2 numbers"),
        ("falcon_h1", {"mamba_d_head": 5}, "mamba_d_head: 5 in 6 heads is not the size 60"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act: 'silu' is not supported: only relu2 is"),
        ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "MX"}, "'MX' has other letters than M"),
        ("nemotron_h", {"layers_block_type": ["moe", "conv"]}, "layers_block_type: must say mamba or linear_attent"),
        ("mamba2", {"n_groups": 3}, "config.json: n_groups: 3 does not divide the 8 heads"),
        ("mamba2", {"time_step_limit": [0.5, 0.1]}, "is not an interval"),
    ],
)
def test_a_wrong_field_is_named(name: str, changes: dict[str, Any], fault: str, checkpoints: Checkpoints) -> None:
    config = json.loads((checkpoints(name) / "config.json").read_text())
    with pytest.raises(ModelError, match=re.escape(fault)):
        parse_config({**config, **changes}, {})
