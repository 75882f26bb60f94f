"""What is gpt-oss's own: its sinks, its defaults, and experts in MXFP4, the form that it is published in."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from packages.scheduler.tests.loaded_model import load
from tercet.kernels.attention.api import AttentionParams
from tercet.kernels.native.library import load_library, missing_library
from tercet.kernels.ops.moe import QuantizedExperts
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.model_files import ModelError, saved_dtype
from tercet.scheduler.models.layers.decoder import CausalLM
from tercet.scheduler.models.registry import build_model, load_config, parse_config
from tercet.scheduler.models.weights.weights import dummy_weights
from tercet.scheduler.testing import Driver, request
from tercet.scheduler.testing.mxfp4_checkpoints import QUANTIZATION, write_mxfp4

Reference = Callable[..., Any]

CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 32,
        "truncate": False,
    },
    "swiglu_limit": 7.0,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
}
PROMPTS = [list(range(30, 71)), [7, 200, 45]]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in MXFP4; next to it, in `published-full`, the same weights in full."""
    directory = tmp_path_factory.mktemp("gpt_oss") / "published"
    write_mxfp4(directory, CONFIG)
    return directory


def full(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}-full")


def options(directory: Path, **given: Any) -> WorkerOptions:
    return WorkerOptions(model=directory, device="cpu", page_size=4, slots=2, kv_cache_bytes=1 << 20, **given)


class PromptBatch:
    """A step that is one whole prompt."""

    replaced = None

    def attend(
        self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        scale, window, sinks = params.scale, params.window, params.sinks
        assert params.softcap == 0
        assert sinks is not None
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        ago = torch.arange(len(q))[:, None] - torch.arange(len(q))
        seen = (ago >= 0) & ((ago < window) | (window == 0))
        scores = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(~seen, -torch.inf)
        weights = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], 2).softmax(2)[:, :, :-1]
        return torch.einsum("hqk,khd->qhd", weights, v)


@torch.inference_mode()
def logits(model: CausalLM) -> torch.Tensor:
    tokens = torch.tensor(PROMPTS[0])
    return model.compute_logits(model(tokens, torch.arange(len(tokens)), PromptBatch()))


@torch.inference_mode()
def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """What transformers says, each token of a forward over all before it."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("dequantized", [False, True])
def test_published_weights_give_what_transformers_gives(
    dequantized: bool, published: Path, reference: Reference
) -> None:
    model = load(published, dequantized=dequantized)
    layers: Any = model.model.layers
    assert {isinstance(layer.mlp.experts.down_proj.value, QuantizedExperts) for layer in layers} == {not dequantized}
    with torch.inference_mode():
        expected = reference(full(published))(torch.tensor([PROMPTS[0]])).logits[0]
    torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("form", ["published", "published-full"])
@pytest.mark.parametrize("backend", ["torch_native", "auto"])
def test_a_worker_says_what_transformers_says(form: str, backend: str, published: Path, reference: Reference) -> None:
    """While one prompt comes in chunks, another decodes."""
    worker = TpModelWorker(options(published.with_name(form), attention_backend=backend))
    driver = Driver(worker.capacity, CoreConfig(token_budget=9), executor=worker)
    for rid, prompt in zip(("short", "long"), reversed(PROMPTS), strict=True):
        driver.send(request(rid, prompt, max_new_tokens=24, temperature=0.0, ignore_eos=True))
    driver.run()
    assert driver.core.counters.mixed_steps > 3
    model = reference(full(published))
    for rid, prompt in zip(("short", "long"), reversed(PROMPTS), strict=True):
        assert driver.output[rid, 0] == greedy(model, prompt, 24)
    worker.close()
    driver.assert_empty()


def test_what_is_written_is_what_transformers_reads(published: Path) -> None:
    stored, plain = (load_file(directory / "model.safetensors") for directory in (published, full(published)))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    theirs = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=torch.float32)
    assert torch.equal(theirs, plain[name])


@pytest.mark.parametrize(
    "part",
    ["self_attn.sinks", "self_attn.o_proj.bias", "mlp.router.bias"]
    + [f"mlp.experts.{name}_bias" for name in ("gate_up_proj", "down_proj")],
)
def test_every_bias_counts(part: str, published: Path, tmp_path: Path) -> None:
    """The checkpoint does tell a model that leaves one out."""
    other = shutil.copytree(published, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors[f"model.layers.1.{part}"].zero_()
    save_file(tensors, other / "model.safetensors")
    assert (logits(load(published)) - logits(load(other))).abs().max() > 1e-3


def test_random_weights_keep_the_form(published: Path) -> None:
    """Experts alone are in few bits."""
    model = build_model(load_config(published))
    dummy_weights(model, quantization=model.config.quantization)
    layer: Any = model.model.layers[0]
    assert layer.mlp.experts.gate_up_proj.value.weight.format == "mxfp4"
    assert layer.self_attn.qkv_proj.quantized is None
    assert logits(model).isfinite().all()
    worker = TpModelWorker(options(published, load_format="dummy"))
    driver = Driver(worker.capacity, executor=worker)
    driver.send(request("a", PROMPTS[1], max_new_tokens=4, ignore_eos=True))
    driver.run()
    assert len(driver.output["a", 0]) == 4
    worker.close()


@pytest.mark.skipif(bool(missing_library()), reason=missing_library())
def test_experts_in_few_bits_are_unpacked_on_the_threads_given(published: Path) -> None:
    library = load_library()
    before = torch.get_num_threads(), library.threads
    try:
        for directory, has in ((published, 3), (full(published), 1)):
            TpModelWorker(options(directory, threads=3)).close()
            assert (torch.get_num_threads(), library.threads) == (has, 3)
    finally:
        torch.set_num_threads(before[0])
        library.set_threads(before[1])


def test_a_part_that_is_missing_is_named(published: Path, tmp_path: Path) -> None:
    other = shutil.copytree(published, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, other / "model.safetensors")
    with pytest.raises(ModelError, match=r"missing: model\.layers\.1\.mlp\.experts\.down_proj_scales$"):
        load(other)


def test_inputs_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    config = {**CONFIG, "intermediate_size": 80, "quantization_config": QUANTIZATION}
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = [f"model.layers.0.mlp.experts.{part}_proj_blocks" for part in ("gate_up", "down")]
    save_file({name: torch.zeros(5, 64, 2, 16, dtype=torch.uint8) for name in names}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"experts\.down_proj: 80 inputs are no blocks of 32$"):
        load(tmp_path)


@pytest.mark.parametrize(("name", "value"), [("swiglu_limit", 5.0), ("swiglu_alpha", 1.0)])
def test_another_gate_is_refused(name: str, value: float) -> None:
    with pytest.raises(ModelError, match=f"json: {name}: only "):
        parse_config({**CONFIG, name: value}, {})


def test_fields_left_out_mean_what_they_mean_to_transformers() -> None:
    left_out = "head_dim", "layer_types", "sliding_window", "rope_theta", "rope_scaling", "swiglu_limit"
    config = parse_config({name: value for name, value in CONFIG.items() if name not in left_out}, {})
    assert (config.head_dim, config.windows, config.rms_norm_eps) == (64, (128, 0, 128), 1e-5)
    assert config.attention_bias
    theirs = GptOssConfig().rope_parameters
    assert config.rope.scaling is not None
    assert config.rope.theta == theirs["rope_theta"]
    scaling = config.rope.scaling
    assert (scaling.type, scaling.factor, scaling.truncate) == (theirs["rope_type"], theirs["factor"], False)
    assert scaling.original_max_position_embeddings == theirs["original_max_position_embeddings"]


def test_beside_experts_in_few_bits_the_dtype_need_not_be_named() -> None:
    config = {name: value for name, value in CONFIG.items() if name != "dtype"}
    assert saved_dtype(config) == "float32"
    assert saved_dtype({**config, "quantization_config": QUANTIZATION}) == "bfloat16"
