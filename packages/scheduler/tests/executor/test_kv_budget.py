"""The size of the KV cache, from options and the memory of a device that a test makes up."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tercet.kernels.ops import sampler_ops
from tercet.scheduler.core.plan import Plan
from tercet.scheduler.executor import kv_budget
from tercet.scheduler.executor.kv_budget import KVBudget, kv_shapes
from tercet.scheduler.executor.kv_pool import KVShape
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.models.config.model_config import DecoderShape
from tercet.scheduler.models.layers.shard import WHOLE
from tercet.scheduler.models.registry import load_config, parse_config

SHAPE = KVShape(page_size=8, kv_heads=2, head_dim=4, dtype=torch.float32)
LAYERS = 3
PAGE = SHAPE.page_bytes * LAYERS
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Memory:
    """A machine of 1000 pages. Loaded weights leave 700 of them, of which a profile run keeps 100."""

    total, available = 1000 * PAGE, 700 * PAGE

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(kv_budget, "total_bytes", lambda _: self.total)
        patch.setattr(kv_budget, "available_bytes", lambda _: self.available)
        patch.setattr(kv_budget, "shares_host_memory", lambda device: device.type == "cpu")
        patch.setattr(kv_budget, "one_page_runner", lambda *_, **__: None)
        patch.setattr(kv_budget, "precompile", self.precompile)
        patch.setattr(kv_budget, "profile_run", self.run)
        self.compiled: list[Plan] = []

    def precompile(self, _: object, plans: Iterable[Plan], cores: int) -> None:
        assert self.available == 700 * PAGE, "kernels are compiled before a step runs"
        assert cores >= 1
        self.compiled += plans

    def run(self, *_: object, **__: object) -> None:
        self.available -= 100 * PAGE


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    return Memory(monkeypatch)


def pages(device: torch.device, **given: Any) -> int:
    options = WorkerOptions(model=Path("model"), page_size=8, slots=10, **given)
    config = DecoderShape(
        architecture="LlamaForCausalLM",
        layers=LAYERS,
        kv_heads=2,
        head_dim=4,
        vocab_size=100,
        context_length=8000,
        eos_token_ids=(),
        dtype=torch.float32,
    )
    budget = KVBudget(options, config, dict.fromkeys(range(LAYERS), SHAPE), device, WHOLE)
    return budget.sizes(None, None, sampler_ops).pages  # type: ignore[arg-type]


@pytest.mark.usefixtures("memory")
def test_without_options_the_cache_is_a_share_of_free_memory() -> None:
    assert pages(CPU) == 350


def test_a_gpu_gives_most_of_what_a_step_leaves(memory: Memory) -> None:
    assert pages(CUDA) == 540
    assert memory.available == 600 * PAGE


def test_a_gpu_compiles_the_kernels_of_every_usual_step_first(memory: Memory) -> None:
    pages(CUDA, kv_cache_bytes=10 * PAGE)
    longest = max(sum(row.count for row in plan.rows) for plan in memory.compiled)
    assert longest == WorkerOptions(model=Path("model"), slots=10).step_tokens
    assert len(memory.compiled) > 20
    memory.compiled.clear()
    pages(CPU)
    assert memory.compiled == []


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(("fraction", "expected"), [(0.75, 450), (0.5, 200), (0.99, 630)])
def test_a_fraction_holds_the_weights_and_the_cache(fraction: float, expected: int) -> None:
    # 300 pages are in use before; with 0.99, a tenth of what is free stays free
    assert pages(CPU, mem_fraction_static=fraction) == expected


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(("fraction", "expected"), [(0.5, 200), (0.9, 540)])
def test_a_fraction_of_a_gpu_leaves_room_for_a_step(fraction: float, expected: int) -> None:
    assert pages(CUDA, mem_fraction_static=fraction) == expected


@pytest.mark.usefixtures("memory")
def test_a_fraction_that_the_weights_fill_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^mem_fraction_static 0\.25: memory in use and the weights leave none"):
        pages(CPU, mem_fraction_static=0.25)


@pytest.mark.usefixtures("memory")
def test_tokens_bound_the_cache() -> None:
    assert pages(CPU, max_total_tokens=8 * 20 + 7) == 20
    assert pages(CPU, max_total_tokens=8 * 400) == 350


GEMMA3_27B = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "vocab_size": 262208,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "vocab_size": 201088,
    "sliding_window": 128,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
}


MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"],
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 32000,
    "sliding_window": 4096,
}
"""Every layer has a window."""


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [(GEMMA3_27B, (47_248, 111_664)), (GPT_OSS_20B, (488_272, 842_848)), (MISTRAL_7B, (183_104, 32 * 32_768))],
    ids=["gemma", "gpt_oss", "mistral"],
)
def test_layers_with_a_window_leave_room_for_more_tokens(
    fields: dict[str, Any], tokens: tuple[int, int], tmp_path: Path
) -> None:
    """The tokens of 24 GB of keys and values with equal groups, and with a group for windows: 2.4 and 1.7 times."""
    (tmp_path / "config.json").write_text(json.dumps({**fields, "dtype": "bfloat16", "max_position_embeddings": 32768}))
    options = WorkerOptions(model=tmp_path, page_size=16, slots=32, step_tokens=4096, kv_cache_bytes=24 * 10**9)
    config = load_config(tmp_path)
    budget = KVBudget(options, config, kv_shapes(options, config, WHOLE), CPU, WHOLE)
    sizes = budget.sizes(None, None, sampler_ops)  # type: ignore[arg-type]
    groups = budget.groups(sizes)
    used = sum(group.pages * shape.page_bytes for group in groups for shape in group.layers.values())
    assert 0.999 * 24 * 10**9 < used <= 24 * 10**9
    page = sum(shape.page_bytes for shape in budget.shapes.values())
    assert (24 * 10**9 // page * 16, sizes.pages * 16) == tokens


def test_without_attention_pages_cost_records_and_snapshots_get_the_rest() -> None:
    given = {"architectures": ["Mamba2ForCausalLM"], "hidden_size": 32, "num_heads": 1, "num_hidden_layers": 2}
    config = replace(parse_config({**given, "n_groups": 1, "dtype": "float32"}, {}), context_length=800)
    [tensors, _] = kv_budget.state_layers(config).values()
    state = 2 * sum(tensor.bytes for tensor in tensors)
    options = WorkerOptions(model=Path("model"), page_size=8, slots=10, kv_cache_bytes=50 * state + 100_000)
    budget = KVBudget(options, config, kv_shapes(options, config, WHOLE), CPU, WHOLE)
    rows = options.rows
    sizes = budget.sizes(None, None, sampler_ops)  # type: ignore[arg-type]
    assert sizes.pages == 10 * 800 // 8
    assert sizes.snapshots == 50 - rows + (100_000 - 64 * sizes.pages) // state
