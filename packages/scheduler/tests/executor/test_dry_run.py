"""The memory that is computed from config.json is the memory that loading takes."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from packages.scheduler.tests.models.families.test_gpt_oss import CONFIG as GPT_OSS
from packages.scheduler.tests.models.weights.test_quantized_checkpoints import CONFIG, GRAIN
from tercet.kernels.ops.moe import QuantizedExperts
from tercet.scheduler.config import ConfigError
from tercet.scheduler.executor.dry_run import rank_memory, report, size_text, unlinked_shard, weights_bytes
from tercet.scheduler.executor.kv_budget import kv_shapes
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.models.layers.decoder import CausalLM
from tercet.scheduler.models.layers.expert_parallel.tokens import with_attention_ranks, with_experts
from tercet.scheduler.models.layers.linear import Linear
from tercet.scheduler.models.layers.moe import ExpertLinear
from tercet.scheduler.models.layers.shard import WHOLE, Shard, Split
from tercet.scheduler.models.registry import build_model, load_config
from tercet.scheduler.models.weights.weights import load_weights
from tercet.scheduler.testing.mxfp4_checkpoints import write_mxfp4
from tercet.scheduler.testing.quantized_checkpoints import KINDS, write_checkpoint

Checkpoints = Callable[[str], Path]
SPLITS = [Split(), Split(shards=2), Split(stages=2), Split(shards=2, stages=3)]
NAMES = ["llama", "qwen3_sliding", "qwen3_moe", "gpt_oss", "deepseek_v3_moe"]


def loaded_bytes(model: CausalLM) -> int:
    """Return the bytes of everything that a loaded model holds."""
    total = sum(tensor.nbytes for tensor in [*model.buffers(), *model.parameters()] if not tensor.is_meta)
    for module in model.modules():
        if isinstance(module, Linear | ExpertLinear) and module.quantized is not None:
            rows = module.quantized.weight if isinstance(module.quantized, QuantizedExperts) else module.quantized
            held = [rows.codes, rows.scales, rows.zeros]
            total += sum(tensor.nbytes for tensor in held if tensor is not None)
    return total


def check(directory: Path, split: Split) -> None:
    config = load_config(directory)
    for rank in range(split.ranks):
        shard = unlinked_shard(split, rank)
        model = build_model(config, shard=shard)
        load_weights(model, directory)
        assert weights_bytes(build_model(config, "meta", shard)) == loaded_bytes(model), (rank, split)


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_weights_are_as_large_as_loaded_ones(name: str, split: Split, checkpoints: Checkpoints) -> None:
    check(checkpoints(name), split)


@pytest.mark.parametrize("split", [Split(), Split(stages=2)], ids=str)
def test_weights_in_few_bits_are_as_large_as_loaded_ones(split: Split, tmp_path: Path) -> None:
    write_mxfp4(tmp_path / "oss", GPT_OSS)
    check(tmp_path / "oss", split)


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_weights_are_about_as_large_as_loaded_ones(kind: str, tmp_path: Path) -> None:
    """Scales of a checkpoint may have another form than config.json says."""
    write_checkpoint(kind, tmp_path / "model", {**CONFIG, "num_key_value_heads": 2}, GRAIN)
    config = load_config(tmp_path / "model")
    model = build_model(config)
    load_weights(model, tmp_path / "model")
    assert weights_bytes(build_model(config, "meta")) == pytest.approx(loaded_bytes(model), rel=0.03)
    full = build_model(config)
    load_weights(full, tmp_path / "model", dequantized=True)
    assert weights_bytes(build_model(config, "meta"), in_full=True) == loaded_bytes(full)


def options_of(directory: Path, **more: Any) -> WorkerOptions:
    return WorkerOptions(model=directory, device="cuda", slots=4, page_size=16, **more)


def test_tokens_fill_what_weights_leave(checkpoints: Checkpoints) -> None:
    directory = checkpoints("llama")
    config, options = load_config(directory), options_of(directory, mem_fraction_static=0.5)
    memory = 2 * weights_bytes(build_model(config, "meta")) + 2 * 37 * 16 * 288 * 4 // 4
    found = rank_memory(options, config, WHOLE, memory)
    token = sum(shape.page_bytes for shape in kv_shapes(options, config, WHOLE).values()) // 16
    assert found.token == token == 3 * 2 * 2 * 8 * 4
    assert found.tokens == (memory // 2 - found.weights) // (16 * token) * 16
    assert rank_memory(replace(options, kv_cache_bytes=3 * 16 * token), config, WHOLE, memory).tokens == 48
    few = rank_memory(options, config, WHOLE, 2 * found.weights)
    assert (few.tokens, few.missing) == (0, 16 * token)


def test_the_report_has_a_line_for_equal_ranks_of_a_host(checkpoints: Checkpoints) -> None:
    directory = checkpoints("llama")
    lines, fits = report(options_of(directory), Split(shards=2, stages=2), 2, 1 << 30, "tiny")
    assert lines[0] == "tiny: LlamaForCausalLM, 3 layers, float32"
    assert lines[1] == "ranks: 4 (2 stages of 2), hosts: 2, memory of each rank: 1.0 GiB"
    rows = [line.split()[:3] for line in lines[3:7]]
    assert rows == [["0", "0", "2-2"], ["1", "0", "2-2"], ["2", "1", "0-1"], ["3", "1", "0-1"]]
    assert len({len(line) for line in lines[2:7]}) == 1
    assert "fits: 2,048 tokens" in lines[7], "as many as 4 requests have"
    assert fits


def test_ranks_with_more_experts_have_a_line_of_their_own(checkpoints: Checkpoints) -> None:
    directory = checkpoints("mixtral")
    options = options_of(directory, expert_parallel_size=2)
    lines, _ = report(options, Split(shards=2), 1, 1 << 30, "tiny")
    config = load_config(directory)
    parts = [with_experts(Shard(rank, 2), 2) for rank in range(2)]
    weights = [weights_bytes(build_model(config, "meta", part)) for part in parts]
    expert, row = 3 * 40 * 48 * 4, 48 * 4
    assert weights[1] - weights[0] == 3 * expert - 2 * row, "one in each layer, but a row less of embedding and head"
    assert [line.split()[3:5] for line in lines[3:5]] == [size_text(each).split() for each in weights]
    model = build_model(config, shard=parts[1])
    load_weights(model, directory)
    assert weights[1] == loaded_bytes(model)


def test_ranks_with_attention_of_their_own_cache_all_heads(checkpoints: Checkpoints) -> None:
    directory = checkpoints("mixtral")
    config = load_config(directory)
    options = options_of(directory, expert_parallel_size=2, attention_ranks=2)
    lines, fits = report(options, Split(shards=2), 1, 1 << 30, "tiny")
    weights = [weights_bytes(build_model(config, "meta", with_attention_ranks(Shard(rank, 2)))) for rank in range(2)]
    assert [line.split()[3:5] for line in lines[3:5]] == [size_text(each).split() for each in weights]
    token = sum(shape.page_bytes for shape in kv_shapes(options, config, WHOLE).values()) // 16
    assert all(f"{token:,} B" in line for line in lines[3:5])
    assert "each rank has a KV cache of its own: 2,048 tokens in all" in lines
    assert fits


def test_a_model_that_does_not_fit_is_not_fitting(checkpoints: Checkpoints) -> None:
    lines, fits = report(options_of(checkpoints("llama")), Split(stages=3), 1, 100_000, "tiny")
    assert not fits
    assert lines[-1].startswith("does not fit: rank ")
    lines, fits = report(options_of(checkpoints("llama")), Split(), 1, 500_000, "tiny")
    assert fits
    assert any(line.startswith("the context length would be lowered from 512 to ") for line in lines)


@pytest.mark.parametrize(
    ("split", "words"),
    [
        (Split(shards=5), "tiny cannot be split in this way: 2 key-value heads cannot be split over 5 processes"),
        (Split(stages=4), "tiny cannot be split in this way: 3 layers cannot be split over 4 pipeline stages"),
        (Split(shards=3), "3 processes cannot be split evenly over --nnodes 2"),
    ],
)
def test_splits_that_no_memory_makes_possible_are_refused(split: Split, words: str, checkpoints: Checkpoints) -> None:
    with pytest.raises(ConfigError, match=words):
        report(options_of(checkpoints("llama")), split, 2 if split.shards == 3 else 1, 1 << 40, "tiny")


def test_models_on_other_modules_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["OPTForCausalLM"]}))
    with pytest.raises(ConfigError, match="OPTForCausalLM runs on transformers' modules"):
        report(options_of(tmp_path), Split(), 1, 1 << 30, "opt")


def test_sizes_have_binary_units() -> None:
    assert [size_text(size) for size in (0, 1000, 1536, 80 << 30, 3 << 50)] == [
        "0 B",
        "1000 B",
        "1.5 KiB",
        "80.0 GiB",
        "3072.0 TiB",
    ]


def test_a_cpu_keeps_16_bit_numbers_that_it_computes_with(tmp_path: Path, checkpoints: Checkpoints) -> None:
    config = json.loads((checkpoints("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    for device, dtype in (("cpu", "bfloat16"), ("cuda", "float16")):
        options = replace(options_of(tmp_path), device=device)
        assert report(options, Split(), 1, 1 << 30, "tiny")[0][0].endswith(dtype)
    assert torch.empty(0, dtype=torch.float16).element_size() == 2
