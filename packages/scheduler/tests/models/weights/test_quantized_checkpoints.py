"""Quantised checkpoints, written by hand as their tools write them, against the weights they stand for."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from packages.scheduler.tests.loaded_model import load, logits
from tercet.kernels.native.library import load_library, missing_library
from tercet.kernels.ops.quantized import QuantizedWeight, dequantize
from tercet.protocol.messages.values import SamplingParams, Task, pack_ints, unpack_floats
from tercet.scheduler.core.plan import PageUpdate, Plan, Row, SlotInit
from tercet.scheduler.executor.encoder_worker import EncoderOptions, EncoderWorker
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.model_files import ModelError
from tercet.scheduler.models.layers.decoder import CausalLM
from tercet.scheduler.models.layers.layer_ops import TorchLayerOps, set_ops
from tercet.scheduler.models.layers.linear import Linear
from tercet.scheduler.models.layers.shard import Cut
from tercet.scheduler.models.native import NativeCausalLM
from tercet.scheduler.models.registry import build_model, load_config, parse_config
from tercet.scheduler.models.weights.quantized_checkpoints import QuantizedLinear
from tercet.scheduler.models.weights.weights import dummy_weights, load_weights
from tercet.scheduler.testing.quantized_checkpoints import (
    KINDS,
    Grain,
    Tensors,
    quantization_config,
    write_checkpoint,
)

HIDDEN, INNER, HEADS, LAYERS = 64, 96, 2, 2

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "dtype": "float32",
}
GRAIN = Grain(group=32, block=(16, 32))
EXPERTS = 8
MIXTURE = {
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
}


def write(kind: str, directory: Path, full: tuple[str, ...] = (), *, mixture: bool = False) -> Path:
    """A checkpoint of a kind, and beside it the same weights without quantisation. Returns the latter."""
    return write_checkpoint(kind, directory, CONFIG | (MIXTURE if mixture else {}), GRAIN, full=full)


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_equals_that_of_the_full_weights(kind: str, tmp_path: Path) -> None:
    full = write(kind, tmp_path / "model")
    expected = logits(load(full))
    for dequantized in (False, True):
        model = load(tmp_path / "model", dequantized=dequantized)
        linears = [module for module in model.model.layers.modules() if isinstance(module, Linear)]
        assert {module.quantized is None for module in linears} == {dequantized}
        assert not dequantized or not any(parameter.is_meta for parameter in model.parameters())
        torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_projections_may_be_stored_as_one(kind: str, share: float, tmp_path: Path) -> None:
    """And their rows be put in another order."""
    phi = CONFIG | {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": share}
    expected = logits(load(write_checkpoint(kind, tmp_path / "model", phi, GRAIN)))
    for dequantized in (False, True):
        model = load(tmp_path / "model", dequantized=dequantized)
        assert (len(quantized(model)) == 4 * LAYERS) != dequantized
        torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mixture", [False, True])
def test_biases_of_zeros_are_none(mixture: bool, tmp_path: Path) -> None:
    """Every layer of an older AutoGPTQ has one, also where the model has not."""
    gate = ("block_sparse_moe.gate",) if mixture else ()
    full = write("gptq", tmp_path / "model", full=gate, mixture=mixture)
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    prefixes = {name: name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")}
    biases = {f"{prefix}.bias": torch.zeros(8 * tensors[name].shape[1]).half() for name, prefix in prefixes.items()}
    save_file(tensors | biases, path)
    torch.testing.assert_close(logits(load(tmp_path / "model")), logits(load(full)), rtol=1e-4, atol=1e-4)
    name = max(biases)
    biases[name][-1] = 0.5
    save_file(tensors | biases, path)
    with pytest.raises(ModelError, match=rf"json: unexpected: {name}$"):
        load(tmp_path / "model")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keep_mapped", [False] if missing_library() else [False, True])
def test_quantised_layers_count_as_read_when_they_are(kind: str, keep_mapped: bool, tmp_path: Path) -> None:
    write(kind, tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    total = sum(tensor.nbytes for tensor in stored.values())
    quantized = sum(tensor.nbytes for name, tensor in stored.items() if "_proj." in name)
    model = build_model(load_config(tmp_path / "model"))
    layers: Any = model.model.layers
    reports: list[tuple[int, int]] = []

    def report(*given: int) -> None:
        reports.append((given[0], given[1]))
        if layers[0].self_attn.qkv_proj.weight.is_meta:
            assert given[0] < total - quantized / 2

    load_weights(model, tmp_path / "model", report, dequantized=True, keep_mapped=keep_mapped)
    if keep_mapped:
        NativeCausalLM(model, load_library())
    assert reports == sorted(set(reports))
    assert reports[-1] == (total, total)


def served(directory: Path, dtype: str) -> torch.Tensor:
    """The log-probabilities that a worker on the CPU gives the token after 16."""
    init = SlotInit(
        slot=0,
        tokens=pack_ints(range(16)),
        prompt_tokens=16,
        choice=0,
        sampling=SamplingParams(max_new_tokens=1),
        top_logprobs=20,
    )
    worker = TpModelWorker(WorkerOptions(model=directory, dtype=dtype, device="cpu", slots=1))
    plan = Plan(step=0, introduce=[init], pages=[PageUpdate(0, 0, [[0]])], rows=[Row(0, 0, 16, sample=True)])
    return torch.tensor(unpack_floats(worker.submit(plan).result().logprobs[0].top_logprobs))


@pytest.mark.parametrize("kind", ["awq", "gptq"])
def test_float16_beside_few_bits_is_served_on_a_cpu_as_bfloat16(kind: str, tmp_path: Path) -> None:
    full = write(kind, tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace('"float32"', '"float16"'))
    ours = served(tmp_path / "model", "auto")
    assert torch.equal(ours, served(full, "bfloat16"))
    torch.testing.assert_close(ours, served(full, "float32"), rtol=0.01, atol=0.05)


@pytest.mark.parametrize("kind", ["awq", "deepseek"])
def test_layers_stored_in_full_stay_so(kind: str, tmp_path: Path) -> None:
    full = write(kind, tmp_path / "model", full=("mlp.down_proj", "self_attn.o_proj"))
    model = load(tmp_path / "model")
    layer: Any = model.model.layers[0]
    assert (layer.mlp.down_proj.quantized, layer.self_attn.o_proj.quantized) == (None, None)
    assert layer.mlp.gate_up_proj.quantized is not None
    torch.testing.assert_close(logits(model), logits(load(full)), rtol=1e-4, atol=1e-4)


SOME = "block_sparse_moe.experts.3.w2"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("full", [(), (SOME,)], ids=["all", "all but one"])
def test_experts_stay_quantised_where_all_are(kind: str, full: tuple[str, ...], tmp_path: Path) -> None:
    other = write(kind, tmp_path / "model", full=("block_sparse_moe.gate", *full), mixture=True)
    model = load(tmp_path / "model")
    layers: Any = model.model.layers
    for layer in layers:
        experts = layer.mlp.experts
        assert experts.gate_up_proj.quantized is not None
        assert (experts.down_proj.quantized is None) == bool(full)
        assert experts.down_proj.weight.is_meta != bool(full)
    torch.testing.assert_close(logits(model), logits(load(other)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["awq", "gptq", "channel", "deepseek"])
@pytest.mark.parametrize("full", [(), (SOME,)], ids=["all", "all but one"])
def test_experts_are_put_in_full(kind: str, full: tuple[str, ...], tmp_path: Path) -> None:
    other = write(kind, tmp_path / "model", full=("block_sparse_moe.gate", *full), mixture=True)
    model, plain = load(tmp_path / "model", dequantized=True), load(other)
    experts = {name: weight for name, weight in model.named_parameters() if ".experts." in name}
    assert len(experts) == 2 * LAYERS
    for name, weight in experts.items():
        torch.testing.assert_close(weight, plain.get_parameter(name), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["awq", "deepseek"])
@pytest.mark.parametrize("full", [(), (SOME,)], ids=["all", "all but one"])
def test_experts_that_are_put_in_full_are_served(kind: str, full: tuple[str, ...], tmp_path: Path) -> None:
    other = write(kind, tmp_path / "model", full=("block_sparse_moe.gate", *full), mixture=True)
    ours, theirs = (served(directory, "float32") for directory in (tmp_path / "model", other))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_missing_scale_of_an_expert_is_named(tmp_path: Path) -> None:
    write("awq", tmp_path / "model", full=("block_sparse_moe.gate",), mixture=True)
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.block_sparse_moe.experts.7.w3.scales"]
    save_file(tensors, path)
    with pytest.raises(ModelError, match=r"missing: model\.layers\.1\.block_sparse_moe\.experts\.7\.w3\.scales$"):
        load(tmp_path / "model")


def test_quantised_experts_in_one_tensor_are_refused(tmp_path: Path) -> None:
    write("deepseek", tmp_path / "model", full=("block_sparse_moe.gate",), mixture=True)
    path = tmp_path / "model" / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if "block_sparse_moe" not in name}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}.mlp"
        tensors[f"{prefix}.gate.weight"] = torch.zeros(EXPERTS, HIDDEN)
        tensors[f"{prefix}.experts.gate_up_proj"] = torch.zeros(EXPERTS, 2 * INNER, HIDDEN).to(torch.float8_e4m3fn)
        tensors[f"{prefix}.experts.down_proj"] = torch.zeros(EXPERTS, HIDDEN, INNER).to(torch.float8_e4m3fn)
    save_file(tensors, path)
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.experts: quantised experts in one tensor"):
        load(tmp_path / "model")


def test_quantised_layers_go_through_the_operations_passed_in(tmp_path: Path) -> None:
    class Counting(TorchLayerOps):
        """Operations that count the weights in few bits they are given."""

        calls = 0

        def project_normed(self, x: Any, residual: Any, norm: Any, weight: Any, *more: Any, **how: Any) -> Any:
            Counting.calls += isinstance(weight, QuantizedWeight)
            return TorchLayerOps.project_normed(x, residual, norm, weight, *more, **how)

        def project_onto(self, x: Any, residual: Any, weight: Any, *more: Any) -> Any:
            Counting.calls += isinstance(weight, QuantizedWeight)
            return TorchLayerOps.project_onto(x, residual, weight, *more)

    write("awq", tmp_path / "model")
    model = load(tmp_path / "model")
    set_ops(model, Counting())
    logits(model)
    assert Counting.calls == 4 * LAYERS


def test_an_encoder_says_that_it_reads_none(tmp_path: Path) -> None:
    write("awq", tmp_path / "model")
    options = EncoderOptions(model=tmp_path / "model", task=Task.EMBED, device="cpu")
    with pytest.raises(ModelError, match="quantised checkpoints are served only of models that generate"):
        EncoderWorker(options)
    EncoderWorker(replace(options, load_format="dummy"))


def test_parts_computed_as_one_are_quantised_together(tmp_path: Path) -> None:
    write("gptq", tmp_path / "model", full=("mlp.up_proj",))
    with pytest.raises(ModelError, match=r"only some of .*gate_proj.*up_proj are quantised"):
        load(tmp_path / "model")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.scales"), r"missing: .*1\.mlp\.up_proj\.scales"),
        (lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.wat": torch.zeros(1)}), r"unexpected: .*wat"),
        (
            lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.qweight": torch.zeros(8, 8).int()}),
            r"wrong shape: .*\[8, 8\] instead of \[64, 12\]",
        ),
    ],
)
def test_what_does_not_fit_is_named(change: Callable[[Tensors], object], message: str, tmp_path: Path) -> None:
    write("awq", tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(ModelError, match=message):
        load(tmp_path / "model")


@pytest.mark.parametrize(
    ("kind", "scale", "shape"),
    [
        ("channel", "weight_scale", [96, 1]),
        ("tensor", "weight_scale", [96, 1]),
        ("deepseek", "weight_scale_inv", [6, 2]),
    ],
)
def test_scales_that_do_not_fit_are_named_before_anything_is_read(
    kind: str, scale: str, shape: list[int], tmp_path: Path
) -> None:
    write(kind, tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    for layer in range(LAYERS):
        del tensors[f"model.layers.{layer}.mlp.gate_proj.{scale}"]
    wrong = f"model.layers.1.mlp.up_proj.{scale}"
    tensors[wrong] = torch.ones(3)
    save_file(tensors, path)
    model = build_model(load_config(tmp_path / "model"))
    model.model.norm.weight.fill_(7.0)
    with pytest.raises(ModelError) as caught:
        load_weights(model, tmp_path / "model")
    assert str(caught.value).endswith(
        f"missing: model.layers.0.mlp.gate_proj.{scale}, model.layers.1.mlp.gate_proj.{scale}; "
        f"of the wrong shape: {wrong} [3] instead of {shape}"
    )
    assert (model.model.norm.weight == 7.0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method: 'bitsandbytes' is not one of"),
        ({"bits": 8}, "bits: 8 is not supported"),
        ({"group_size": 48}, "group_size: 48 is neither"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format: 'marlin'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size: .* is not a pair"),
        ({"quant_method": "compressed-tensors"}, "config_groups: must be one group"),
    ],
)
def test_what_is_not_known_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_config({**CONFIG, "quantization_config": {**quantization_config("gptq", GRAIN), **change}}, {})


def test_dummy_weights_are_in_full(tmp_path: Path) -> None:
    full = write("awq", tmp_path / "model")
    shutil.copy(tmp_path / "model" / "config.json", full / "config.json")
    model = build_model(load_config(full))
    dummy_weights(model)
    assert logits(model).isfinite().all()


def quantized(model: CausalLM) -> dict[str, QuantizedWeight]:
    held = {name: getattr(module, "quantized", None) for name, module in model.named_modules()}
    return {name: getattr(found, "weight", found) for name, found in held.items() if found is not None}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mixture", [False, True])
def test_dummy_weights_take_the_layout_of_a_checkpoint(kind: str, mixture: bool, tmp_path: Path) -> None:
    write(kind, tmp_path / "model", full=("block_sparse_moe.gate",) if mixture else (), mixture=mixture)
    config = load_config(tmp_path / "model")
    dummy = build_model(config)
    dummy_weights(dummy, quantization=config.quantization)
    read, made = quantized(load(tmp_path / "model")), quantized(dummy)
    assert read.keys() == made.keys() != set()
    for name, weight in read.items():
        mine = made[name]
        assert (mine.format, mine.block, mine.shape) == (weight.format, weight.block, weight.shape)
        for theirs, ours in ((weight.codes, mine.codes), (weight.scales, mine.scales), (weight.zeros, mine.zeros)):
            assert (None if ours is None else (ours.shape, ours.dtype, ours.is_contiguous())) == (
                None if theirs is None else (theirs.shape, theirs.dtype, theirs.is_contiguous())
            )
        assert dequantize(mine).std().item() == pytest.approx(0.02, rel=0.1)
    assert logits(dummy).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_unpacked_on_the_device(kind: str, tmp_path: Path) -> None:
    """Here one that only knows shapes, and computes nothing with tensors of another device."""
    write(kind, tmp_path / "model")
    config = load_config(tmp_path / "model")
    stored, meta = load_file(tmp_path / "model" / "model.safetensors"), torch.device("meta")
    linear = Linear(HIDDEN, INNER, bias=False, dtype=torch.bfloat16, quantized=True)
    assert config.quantization is not None
    given = QuantizedLinear(
        linear, {"model.layers.0.mlp.up_proj": Cut.all(INNER)}, Cut.all(HIDDEN), config.quantization
    )
    given.load(lambda name: stored[name].to(meta), meta, None)
    weight = linear.quantized
    assert weight is not None
    assert weight.shape == (INNER, HIDDEN)
    assert {x.device for x in (weight.codes, weight.scales, weight.zeros) if x is not None} == {meta}


def test_quantization_may_be_said_beside_the_config(tmp_path: Path) -> None:
    """As in older checkpoints of ModelOpt, which name no method."""
    full = write("modelopt", tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    said = config.pop("quantization_config") | {"exclude_modules": ["lm_head"]}
    del said["quant_method"]
    path.write_text(json.dumps(config))
    beside = tmp_path / "model" / "hf_quant_config.json"
    beside.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": said}))
    model = load(tmp_path / "model")
    assert len(quantized(model)) == 4 * LAYERS
    torch.testing.assert_close(logits(model), logits(load(full)), rtol=1e-4, atol=1e-4)
    beside.write_text(json.dumps({"quantization": "NVFP4"}))
    with pytest.raises(ModelError, match=r"^hf_quant_config\.json: quantization is not an object$"):
        load(tmp_path / "model")


def test_fp8_of_modelopt_is_read(tmp_path: Path) -> None:
    full = write("tensor", tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}))
    torch.testing.assert_close(logits(load(tmp_path / "model")), logits(load(full)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["nvfp4", "modelopt"])
def test_every_nvfp4_number_is_kept_exactly(kind: str, tmp_path: Path) -> None:
    full = write(kind, tmp_path / "model")
    layer: Any = load(tmp_path / "model").model.layers[1]
    weight = layer.mlp.down_proj.quantized
    assert (weight.format, weight.block) == ("int8", (1, 16))
    assert set(weight.codes.unique().tolist()) == {-12, -8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 12}
    stored = load_file(full / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    torch.testing.assert_close(dequantize(weight), stored, rtol=3e-7, atol=0)


def test_nvfp4_of_another_layout_is_refused(tmp_path: Path) -> None:
    write("modelopt", tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.up_proj"
    save_file(tensors | {f"{name}.weight_scale": tensors[f"{name}.weight_scale"].float()}, path)
    with pytest.raises(ModelError, match=f"{name}.weight_scale: stored as F32, and only F8_E4M3 is read"):
        load(tmp_path / "model")
    save_file(tensors | {f"{name}.pre_quant_scale": torch.ones(HIDDEN)}, path)
    with pytest.raises(ModelError, match=f"unexpected: {name}.pre_quant_scale"):
        load(tmp_path / "model")
