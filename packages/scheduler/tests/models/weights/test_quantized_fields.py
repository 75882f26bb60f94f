"""Each field of quantization_config at another value: the answer of the weights it stands for, or a refusal by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from packages.scheduler.tests.loaded_model import load, logits
from packages.scheduler.tests.models.weights.test_quantized_checkpoints import CONFIG, GRAIN, HIDDEN
from tercet.kernels.ops.quantized import dequantize
from tercet.scheduler.file_fields import FileFields
from tercet.scheduler.model_files import ModelError
from tercet.scheduler.models.config import quantized_fields
from tercet.scheduler.models.config.quantized_config import parse_quantization
from tercet.scheduler.models.layers.linear import Linear
from tercet.scheduler.models.layers.shard import Cut
from tercet.scheduler.models.weights.quantized_checkpoints import QuantizedLinear
from tercet.scheduler.testing.quantized_checkpoints import (
    KINDS,
    PUBLIC_GRAIN,
    Tensors,
    quantization_config,
    write_checkpoint,
)

CHECKED = {
    "awq": quantized_fields.AWQ,
    "gptq": quantized_fields.GPTQ,
    "deepseek": quantized_fields.FP8,
    "tensor": quantized_fields.COMPRESSED_TENSORS,
    "modelopt": quantized_fields.MODELOPT,
}


def written(kind: str, directory: Path) -> tuple[Path, Path]:
    """Return a checkpoint of a kind, and one of the weights that it stands for."""
    return directory / "model", write_checkpoint(kind, directory / "model", CONFIG, GRAIN)


def changed(directory: Path, change: dict[str, Any]) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= change
    path.write_text(json.dumps(config))


def restored(directory: Path, change: Callable[[str, torch.Tensor], Tensors]) -> None:
    """Store every tensor as `change` makes it."""
    path = directory / "model.safetensors"
    tensors: Tensors = {}
    for name, tensor in load_file(path).items():
        tensors |= change(name, tensor)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


HONOURED: list[tuple[str, dict[str, Any]]] = [
    ("gptq", {"desc_act": True, "static_groups": True}),
    ("gptq", {"sym": True, "lm_head": False, "damp_percent": 0.05, "meta": {"quantizer": ["gptqmodel:7.7.0"]}}),
    ("gptq", {"format": "gptq"}),
    ("gptq", {"checkpoint_format": "GPTQ", "format": "gptq_v2"}),
    ("gptq", {"dynamic": {"-:.*down_proj": {}, "+:.*": {"bits": 4, "group_size": 32}}, "backend": "torch"}),
    ("gptq", {"modules_in_block_to_quantize": [["self_attn.q_proj"]], "pack_dtype": "int32"}),
    ("gptq row", {"checkpoint_format": None, "format": "gptq_v2"}),
    ("awq", {"version": "GEMM", "modules_to_not_convert": ["lm_head"], "backend": "autoawq"}),
    ("awq", {"version": None, "format": "gemm"}),
    ("awq", {"bits": 4, "zero_point": None}),
    ("deepseek", {"activation_scheme": "static", "ignored_layers": ["lm_head"], "fmt": "e4m3", "scale_fmt": "ue8m0"}),
    ("tensor", {"format": "float-quantized", "ignore": ["lm_head"], "kv_cache_scheme": {"num_bits": 8}}),
    ("int8", {"format": "int-quantized", "ignore": ["lm_head"]}),
    ("packed", {"ignore": ["lm_head"], "quantization_status": "compressed"}),
    ("packed zeros", {"version": "0.13.0"}),
    ("nvfp4", {"ignore": ["lm_head"], "quantization_status": "compressed"}),
    ("modelopt", {"producer": {"name": "modelopt"}, "exclude_modules": ["lm_head"], "group_size": 16}),
    ("modelopt", {"config_groups": {"group_0": {}}, "ignore": ["lm_head"], "kv_cache_scheme": {"num_bits": 8}}),
]


@pytest.mark.parametrize(("kind", "change"), HONOURED)
def test_values_that_are_honoured_give_the_answer_of_the_full_weights(
    kind: str, change: dict[str, Any], tmp_path: Path
) -> None:
    model, full = written(kind, tmp_path)
    changed(model, change)
    torch.testing.assert_close(logits(load(model)), logits(load(full)), rtol=1e-4, atol=1e-4)


def group(**weights: Any) -> dict[str, Any]:
    return {"config_groups": {"a": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel", **weights}}}}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gptq", {"format": "gptq_p"}, "format: 'gptq_p'"),
    ("gptq", {"lm_head": True}, "lm_head: True"),
    ("gptq", {"rotation": "hadamard"}, "rotation: 'hadamard'"),
    ("gptq", {"adapter": {"name": "lora"}}, "adapter: {"),
    ("gptq", {"pack_dtype": "int16"}, "pack_dtype: 'int16'"),
    ("gptq", {"is_marlin_format": True}, "is_marlin_format: True"),
    ("gptq", {"dynamic": {".*down.*": {"bits": 8}}}, r"dynamic\.\.\*down\.\*\.bits: 8"),
    ("gptq", {"dynamic": {"+:x": {"group_size": 64}}}, r"dynamic\.\+:x\.group_size: 64"),
    ("gptq", {"dynamic": [4]}, "dynamic: is not an object"),
    ("gptq", {"group_size": 64.0}, r"group_size: 64\.0"),
    ("gptq", {"bits": 4.0}, r"bits: 4\.0"),
    ("awq", {"zero_point": False}, "zero_point: False"),
    ("awq", {"version": "gemv"}, "version: 'gemv'"),
    ("awq", {"version": None, "format": "gemv"}, "format: 'gemv'"),
    ("awq", {"backend": "llm-awq"}, "backend: 'llm-awq'"),
    ("deepseek", {"activation_scheme": "per-token"}, "activation_scheme: 'per-token'"),
    ("deepseek", {"modules_to_convert": ["embed_tokens"]}, r"modules_to_convert: \['embed_tokens'\]"),
    ("deepseek", {"expert_dtype": "fp4"}, "expert_dtype: 'fp4'"),
    ("deepseek", {"fmt": "e5m2"}, "fmt: 'e5m2'"),
    ("deepseek", {"scale_fmt": "int"}, "scale_fmt: 'int'"),
    ("tensor", {"format": "pack-quantized"}, "format: 'pack-quantized'"),
    ("tensor", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config: "),
    ("tensor", {"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}, "transform_config: "),
    ("tensor", {"config_groups": {"a": {}, "b": {}}}, "config_groups: must be one group"),
    ("tensor", group(symmetric=False), r"config_groups\.a\.weights\.symmetric: False"),
    ("tensor", group(actorder="group"), r"config_groups\.a\.weights\.actorder: 'group'"),
    ("tensor", group(dynamic=True), r"config_groups\.a\.weights\.dynamic: True"),
    ("tensor", group(group_size=32), r"config_groups\.a\.weights\.group_size: 32"),
    ("tensor", group(strategy="group"), r"config_groups\.a\.weights\.strategy: 'group'"),
    ("tensor", group(strategy="block"), r"config_groups\.a\.weights\.block_structure: is missing"),
    ("tensor", group(num_bits=3), r"config_groups\.a\.weights: only floats and integers of 8 and 4 bits"),
    ("tensor", group(num_bits=4), "format: None is not one of nvfp4-pack-quantized"),
    ("nvfp4", group(num_bits=4), r"config_groups\.a\.weights\.strategy: 'channel' is not one of tensor_group"),
    ("nvfp4", group(num_bits=4, strategy="tensor_group"), r"config_groups\.a\.weights\.group_size: None"),
    ("nvfp4", {"format": "mxfp4-pack-quantized"}, "format: 'mxfp4-pack-quantized'"),
    ("modelopt", {"quant_algo": "W4A8_AWQ"}, "quant_algo: 'W4A8_AWQ' is not one of FP8, NVFP4"),
    ("modelopt", {"quant_algo": None}, "quant_algo: None is not one of FP8, NVFP4"),
    ("modelopt", {"group_size": 32}, "group_size: 32"),
    ("int8", group(type="int", strategy="block"), r"config_groups\.a\.weights\.strategy: 'block'"),
    ("int8", group(type="int", symmetric=False), r"config_groups\.a\.weights\.symmetric: False"),
    ("int8", {"format": "float-quantized"}, "format: 'float-quantized' is not one of int-quantized"),
    ("tensor", group(num_bits=4, type="int"), "format: None is not one of pack-quantized"),
    ("packed", group(num_bits=4, type="int", strategy="tensor"), r"config_groups\.a\.weights\.strategy: 'tensor'"),
    ("packed", group(num_bits=4, type="int", strategy="group"), r"config_groups\.a\.weights\.group_size: None"),
    ("packed", {"format": "int-quantized"}, "format: 'int-quantized'"),
    ("packed", {"format": "float-quantized"}, "format: 'float-quantized' is not one of pack-quantized"),
]


@pytest.mark.parametrize(("kind", "change", "message"), REFUSED)
def test_values_that_are_not_supported_are_refused_by_name(kind: str, change: dict[str, Any], message: str) -> None:
    config = {**quantization_config(kind, GRAIN), **change}
    with pytest.raises(ModelError, match=f"quantization_config.{message}") as caught:
        parse_quantization({"quantization_config": config})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", CHECKED)
def test_every_field_that_is_refused_unless_unset_is_refused(kind: str) -> None:
    fields: FileFields = CHECKED[kind]
    for name in fields.refused:
        config = {**quantization_config(kind, GRAIN), name: "another"}
        with pytest.raises(
            ModelError, match=rf"^config\.json: quantization_config\.{name}: 'another' is not supported"
        ):
            parse_quantization({"quantization_config": config})


@pytest.mark.parametrize("desc_act", [True, False])
@pytest.mark.parametrize("kind", ["gptq", "gptq row"])
def test_inputs_that_are_not_in_the_order_of_their_groups_are_refused(
    kind: str, desc_act: bool, tmp_path: Path
) -> None:
    model, _ = written(kind, tmp_path)
    changed(model, {"desc_act": desc_act})
    order = torch.randperm(HIDDEN, generator=torch.Generator().manual_seed(1)).int() // 32
    restored(model, lambda name, tensor: {name: order if name.endswith("0.self_attn.k_proj.g_idx") else tensor})
    with pytest.raises(ModelError, match=r"k_proj\.g_idx: the inputs are not in the order of their groups \(desc_act"):
        load(model)


@pytest.mark.parametrize("kind", ["channel", "tensor", "deepseek"])
@pytest.mark.parametrize("shape", [None, ()])
def test_fp8_scales_have_either_name(kind: str, shape: tuple[int, ...] | None, tmp_path: Path) -> None:
    """And those of a whole weight may have no dimension."""
    other = {"weight_scale": "weight_scale_inv", "weight_scale_inv": "weight_scale"}
    model, full = written(kind, tmp_path)

    def renamed(name: str, tensor: torch.Tensor) -> Tensors:
        path, _, last = name.rpartition(".")
        flat = tensor.view(shape) if last in other and shape is not None and tensor.numel() == 1 else tensor
        return {f"{path}.{other.get(last, last)}": flat}

    restored(model, renamed)
    if kind != "deepseek":
        config = json.loads((model / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": None}
        (model / "config.json").write_text(json.dumps(config))
    torch.testing.assert_close(logits(load(model)), logits(load(full)), rtol=1e-4, atol=1e-4)


def test_scales_under_both_names_are_refused(tmp_path: Path) -> None:
    model, _ = written("tensor", tmp_path)
    restored(
        model, lambda name, tensor: {name.replace("weight_scale", "weight_scale_inv"): tensor.clone(), name: tensor}
    )
    with pytest.raises(ModelError, match=r"unexpected: .*k_proj\.weight_scale_inv"):
        load(model)


@pytest.mark.parametrize(
    ("kind", "last", "dtype", "stored"),
    [
        ("deepseek", "weight_scale_inv", torch.uint8, "U8"),
        ("tensor", "weight_scale", torch.int32, "I32"),
        ("gptq", "scales", torch.int32, "I32"),
        ("gptq", "qzeros", torch.float32, "F32"),
        ("awq", "qweight", torch.float32, "F32"),
    ],
)
def test_tensors_of_another_kind_of_number_are_refused(
    kind: str, last: str, dtype: torch.dtype, stored: str, tmp_path: Path
) -> None:
    """Scales in bytes are exponents (ue8m0)."""
    model, _ = written(kind, tmp_path)
    restored(model, lambda name, tensor: {name: tensor.to(dtype) if name.endswith(f"k_proj.{last}") else tensor})
    with pytest.raises(ModelError, match=rf"k_proj\.{last}: stored as {stored}, and only"):
        load(model)


def test_scales_of_blocks_are_not_taken_for_those_of_outputs(tmp_path: Path) -> None:
    """The blocks here are as many as the outputs: [8, 8] of 64."""
    model, _ = written("channel", tmp_path)
    restored(model, lambda name, tensor: {name: tensor.view(8, -1) if name.endswith("weight_scale") else tensor})
    with pytest.raises(ModelError, match=r"q_proj\.weight_scale \[8, 8\] instead of \[64, 1\]"):
        load(model)


@pytest.mark.parametrize("kind", ["deepseek", "tensor"])
def test_fp8_gives_what_transformers_gives(kind: str, tmp_path: Path) -> None:
    model, _ = written(kind, tmp_path)

    def renamed(name: str, tensor: torch.Tensor) -> Tensors:
        scale = name.endswith("weight_scale")
        return {f"{name}_inv" if scale else name: tensor.view(()) if scale else tensor}

    restored(model, renamed)
    config = json.loads((model / "config.json").read_text())
    block = [*GRAIN.block] if kind == "deepseek" else None
    config |= {
        "model_type": "llama",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": block, "activation_scheme": "dynamic"},
    }
    (model / "config.json").write_text(json.dumps(config))
    reference = AutoModelForCausalLM.from_pretrained(
        model,
        dtype=torch.float32,
        quantization_config=FineGrainedFP8Config(weight_block_size=block, dequantize=True),
    ).eval()
    tokens = torch.arange(40)
    ours = logits(load(model))
    with torch.inference_mode():
        theirs = reference(tokens[None]).logits[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["lm_head", "model.embed_tokens"])
@pytest.mark.parametrize("kind", ["gptq", "tensor"])
def test_quantized_heads_and_embeddings_are_refused_by_name(kind: str, name: str, tmp_path: Path) -> None:
    model, _ = written(kind, tmp_path)
    stored = load_file(model / "model.safetensors")
    prefix = "model.layers.0.self_attn.q_proj."
    own = {path.replace(prefix, f"{name}."): tensor.clone() for path, tensor in stored.items() if prefix in path}
    restored(model, lambda path, tensor: own if path == f"{name}.weight" else {path: tensor})
    with pytest.raises(ModelError, match=rf"unexpected: {name}\.\w+"):
        load(model)


@pytest.mark.parametrize(
    ("kind", "change", "activations"),
    [
        ("tensor", {}, "fp8"),
        ("channel", {}, None),
        ("deepseek", {}, "fp8"),
        ("deepseek", {"activation_scheme": "static"}, "fp8"),
        ("int8", {}, "int8"),
        ("int8", {"input_activations": None}, None),
        ("int8", {"input_activations": {"num_bits": 8, "type": "int", "symmetric": False}}, None),
        ("int8", {"input_activations": {"num_bits": 8, "type": "float"}}, None),
        ("tensor", {"input_activations": {"num_bits": 4, "type": "float"}}, None),
        ("awq", {}, None),
    ],
)
def test_activations_are_rounded_where_the_checkpoint_says_so(
    kind: str, change: dict[str, Any], activations: str | None
) -> None:
    config = quantization_config(kind, GRAIN)
    (config["config_groups"]["group_0"] if "input_activations" in change else config).update(change)
    found = parse_quantization({"quantization_config": config})
    assert found is not None
    assert found.activations == activations


@pytest.mark.parametrize("kind", ["tensor", "int8", "channel"])
def test_weights_say_for_which_activations_they_were_made(kind: str, tmp_path: Path) -> None:
    model, _ = written(kind, tmp_path)
    loaded = load(model)
    weights = [module.quantized for module in loaded.modules() if isinstance(module, Linear) and module.quantized]
    wanted = {"tensor": "fp8", "int8": "int8", "channel": None}[kind]
    assert {weight.activations for weight in weights} == {wanted}


def test_blocks_of_128_rows_have_one_scale() -> None:
    """Their kernels take whole blocks; a fused layer's parts are whole blocks, too."""
    weight, scales = torch.randn(128, 256).to(torch.float8_e4m3fn), torch.rand(1, 2)
    quantization = parse_quantization({"quantization_config": quantization_config("deepseek", PUBLIC_GRAIN)})
    assert quantization is not None
    tensors = {"weight": weight, "weight_scale_inv": scales}
    target = Linear(256, 256, bias=False, dtype=torch.bfloat16, quantized=True)
    parts = {"a": Cut.all(128), "b": Cut.all(128)}
    layer = QuantizedLinear(target, parts, Cut.all(256), quantization)
    layer.load(lambda name: tensors[name.partition(".")[2]], torch.device("cpu"), None)
    assert target.quantized is not None
    assert target.quantized.block == (128, 128)
    assert torch.equal(target.quantized.scales, scales.expand(2, 2))
    whole = weight.float() * scales.repeat_interleave(128, 1)
    assert torch.equal(dequantize(target.quantized), torch.cat([whole, whole]))


def test_all_kinds_are_tried() -> None:
    assert {kind for kind, _ in HONOURED} == {*KINDS} - {"channel"}
