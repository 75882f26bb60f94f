"""Mixtures whose experts are placed on several ranks, each with its experts' weights alone, against one process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import local
from typing import Any

import pytest
import torch

from packages.scheduler.tests.conftest import MIXTURES, make_checkpoint
from packages.scheduler.tests.models.families.test_gpt_oss import CONFIG as GPT_OSS
from packages.scheduler.tests.models.test_stages import logits as stage_logits
from packages.scheduler.tests.models.test_tensor_parallel import load, logits
from packages.scheduler.tests.models.weights.test_quantized_checkpoints import CONFIG, GRAIN, MIXTURE
from tercet.kernels.native.library import load_library, missing_library
from tercet.scheduler.models.layers.decoder import CausalLM
from tercet.scheduler.models.layers.expert_parallel.placement import Placement
from tercet.scheduler.models.layers.expert_parallel.tokens import with_experts
from tercet.scheduler.models.layers.moe import Experts
from tercet.scheduler.models.layers.shard import WHOLE, Cut, Shard
from tercet.scheduler.models.native_linear import use_native_projections
from tercet.scheduler.models.registry import build_model, load_config
from tercet.scheduler.models.weights import weights as weights_module
from tercet.scheduler.models.weights.tensor_files import open_tensors
from tercet.scheduler.testing.mxfp4_checkpoints import write_mxfp4
from tercet.scheduler.testing.quantized_checkpoints import write_checkpoint
from tercet.scheduler.testing.thread_ranks import on_ranks

Checkpoints = Callable[[str], Path]
WHOLE_ALONE = {"minimax_m2", "olmoe", "gemma4", "gemma3n"}
"""Families that normalize the heads of all ranks as one, and some without experts."""
SPLIT = [name for name in MIXTURES if name not in WHOLE_ALONE]
FUSED = [f"{name}/fused" for name in ("mixtral", "qwen3_moe", "deepseek_v3_moe", "llama4")]
HYBRIDS = ["qwen3_5_moe", "lfm2_moe", "granite_hybrid_moe"]


def check(directory: Path, size: int, experts: int, *, far: float = 2e-4, **how: Any) -> None:
    """Check that each rank gives the logits of one process, and all the same bits."""
    expected = logits(load(directory, WHOLE, **how))
    first, *others = on_ranks(size, lambda shard: logits(load(directory, shard, **how)), experts=experts)
    torch.testing.assert_close(first, expected, atol=far, rtol=1e-4)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("name", [*SPLIT, *FUSED])
def test_two_ranks_give_what_one_process_gives(name: str, checkpoints: Checkpoints) -> None:
    check(checkpoints(name), 2, 2)


@pytest.mark.parametrize("name", HYBRIDS)
def test_mixtures_beside_recurrent_states(name: str, checkpoints: Checkpoints) -> None:
    check(checkpoints(name), 2, 2, far=1e-3)


def test_experts_of_latent_size(tmp_path: Path) -> None:
    check(make_checkpoint("nemotron_h", tmp_path, n_groups=2), 2, 2)


def test_experts_of_pipeline_stages(checkpoints: Checkpoints) -> None:
    directory = checkpoints("qwen3_moe")
    *_, one, other = on_ranks(2, lambda shard: stage_logits(load(directory, shard)), stages=2, experts=2)
    torch.testing.assert_close(one, logits(load(directory, WHOLE)), atol=2e-4, rtol=1e-4)
    assert torch.equal(one, other)


@pytest.mark.parametrize("experts", [2, 4])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "qwen2_moe"])
def test_columns_of_experts_are_split_in_groups(name: str, experts: int, tmp_path: Path) -> None:
    """Four ranks with two groups of experts each have half of the columns; a step has fewer tokens than groups."""
    check(make_checkpoint(name, tmp_path, num_attention_heads=4, num_key_value_heads=4, head_dim=12), 4, experts)


@pytest.mark.parametrize("kind", ["deepseek", "awq", "int8"])
@pytest.mark.parametrize("dequantized", [False, True])
def test_quantized_experts(kind: str, dequantized: bool, tmp_path: Path) -> None:
    config = CONFIG | {"num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 389} | MIXTURE
    write_checkpoint(kind, tmp_path / "model", config, GRAIN, full=("block_sparse_moe.gate",))
    check(tmp_path / "model", 2, 2, dequantized=dequantized)


@pytest.mark.parametrize("experts", [1, 2])
def test_experts_as_gpt_oss_is_published(experts: int, tmp_path: Path) -> None:
    write_mxfp4(tmp_path / "model", GPT_OSS | {"intermediate_size": 128, "vocab_size": 389})
    check(tmp_path / "model", 2, experts)


@pytest.mark.skipif(bool(missing_library()), reason=missing_library())
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss/fused", "deepseek_v3_moe"])
def test_native_kernels_give_what_one_process_gives(name: str, checkpoints: Checkpoints) -> None:
    def packed(shard: Shard) -> CausalLM:
        model = load(checkpoints(name), shard)
        assert use_native_projections(model, load_library())
        return model

    expected = logits(load(checkpoints(name), WHOLE))
    first, other = on_ranks(2, lambda shard: logits(packed(shard)), experts=2)
    torch.testing.assert_close(first, expected, atol=5e-4, rtol=5e-4)
    assert torch.equal(first, other)


def test_a_rank_reads_its_own_experts_alone(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[list[str]] = [[], []]
    of_thread = local()

    class Recorded:
        def __init__(self, file: Any) -> None:
            self._file = file

        def get_tensor(self, name: str) -> Any:
            read[of_thread.rank].append(name)
            return self._file.get_tensor(name)

    @contextmanager
    def opened(path: Path, plain: Any = open_tensors) -> Iterator[Recorded]:
        with plain(path) as file:
            yield Recorded(file)

    monkeypatch.setattr(weights_module, "open_tensors", opened)

    def run(shard: Shard) -> None:
        of_thread.rank = shard.rank
        load(checkpoints("mixtral"), shard)

    on_ranks(2, run, experts=2)
    experts = [
        {int(name.split(".experts.")[1].split(".")[0]) for name in names if ".experts." in name} for names in read
    ]
    assert experts == [{0, 1}, {2, 3, 4}]
    assert [sum(".experts." in name for name in names) for names in read] == [2 * 3 * 3, 3 * 3 * 3]


@pytest.mark.parametrize("name", ["mixtral/fused", "gpt_oss"])
def test_tensors_of_all_experts_are_read_in_part(
    name: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part is a view of the mapped file: the rest is not touched."""
    taken: list[tuple[int, int]] = []
    plain = Cut.of

    def recorded(cut: Cut, stored: torch.Tensor) -> torch.Tensor:
        held = plain(cut, stored)
        if stored.ndim == 3:
            assert held.untyped_storage().data_ptr() == stored.untyped_storage().data_ptr()
            taken.append((len(stored), len(held)))
        return held

    monkeypatch.setattr(Cut, "of", recorded)
    config = load_config(checkpoints(name))
    assert config.moe is not None
    load(checkpoints(name), with_experts(Shard(0, 2), 2))
    assert {(config.moe.experts, config.moe.experts // 2)} <= {*taken}
    assert all(held <= config.moe.experts // 2 for _, held in taken)


def test_each_rank_holds_its_experts_in_full(checkpoints: Checkpoints) -> None:
    whole, one, other = (
        next(module for module in load(checkpoints("gpt_oss"), shard).modules() if isinstance(module, Experts))
        for shard in (WHOLE, *(with_experts(Shard(rank, 2), 2) for rank in range(2)))
    )
    for each in ("gate_up_proj.weight", "gate_up_proj.bias", "down_proj.weight", "down_proj.bias"):
        parts = [part.get_parameter(each).data for part in (one, other)]
        assert torch.equal(torch.cat(parts), whole.get_parameter(each))


@pytest.mark.parametrize("name", ["mixtral", "mixtral/fused", "gpt_oss", "deepseek_v3_moe"])
def test_copies_of_experts_give_the_same(name: str, checkpoints: Checkpoints) -> None:
    """Every second layer has two experts twice, and the others placed by their loads."""
    config = load_config(checkpoints(name))
    assert config.moe is not None
    count = config.moe.experts
    placements = {layer: Placement.balanced([7, 9, *range(count - 2)], 2, 2) for layer in range(0, config.layers, 2)}

    def run(shard: Shard) -> tuple[torch.Tensor, dict[int, list[int]]]:
        group = replace(shard.experts, placements=placements)
        given = replace(shard, experts=group)
        return logits(load(checkpoints(name), given)), group.loads.counts()

    (one, loads), (other, others) = on_ranks(2, run, experts=2)
    torch.testing.assert_close(one, logits(load(checkpoints(name), WHOLE)), atol=2e-4, rtol=1e-4)
    assert torch.equal(one, other)
    assert loads == others
    tokens = 20 + (1 + 9) + (1 + 1)
    assert [*loads] == [layer for layer, mixes in enumerate(config.moe.layers) if mixes]
    assert {sum(load) for load in loads.values()} == {tokens * config.moe.routing.top_k}
    assert {len(load) for load in loads.values()} == {count}


def test_loads_of_another_model_are_refused(checkpoints: Checkpoints) -> None:
    shard = with_experts(Shard(0, 2), 2, placements={0: Placement.balanced([1] * 7, 2)})
    with pytest.raises(ValueError, match="layer 0 has 5 experts, not 7 as in the file of expert loads"):
        build_model(load_config(checkpoints("mixtral")), "meta", shard)


def test_splits_that_cannot_be_are_refused(checkpoints: Checkpoints) -> None:
    with pytest.raises(ValueError, match="--expert-parallel-size 2 must divide --tensor-parallel-size 3"):
        with_experts(Shard(0, 3), 2)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts"):
        build_model(load_config(checkpoints("llama")), "meta", with_experts(Shard(0, 2), 2))
    with pytest.raises(ValueError, match="5 experts cannot be placed on 6 ranks"):
        build_model(load_config(checkpoints("mixtral")), "meta", with_experts(Shard(0, 6), 6))
