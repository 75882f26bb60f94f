"""Mixtures whose ranks compute the attention of their own sequences, and the experts of all, against one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from packages.scheduler.tests.conftest import MIXTURES, make_checkpoint
from packages.scheduler.tests.models.families.test_families import Paged
from packages.scheduler.tests.models.test_expert_parallel import FUSED, HYBRIDS
from packages.scheduler.tests.models.test_tensor_parallel import TOKENS, load
from packages.scheduler.tests.models.weights.test_quantized_checkpoints import CONFIG, GRAIN, MIXTURE
from tercet.kernels.native.library import load_library, missing_library
from tercet.scheduler.models.layers.decoder import CausalLM
from tercet.scheduler.models.layers.expert_parallel.tokens import with_attention_ranks
from tercet.scheduler.models.layers.moe import MixtureOfExperts
from tercet.scheduler.models.layers.shard import WHOLE, Shard, Stage
from tercet.scheduler.models.native_linear import use_native_projections
from tercet.scheduler.models.registry import build_model, load_config
from tercet.scheduler.testing.quantized_checkpoints import write_checkpoint
from tercet.scheduler.testing.thread_ranks import on_ranks

Checkpoints = Callable[[str], Path]
Steps = list[torch.Tensor | None]
DENSE = {"gemma3n", "gemma4"}
STEPS: list[Steps] = [
    [TOKENS[:20], TOKENS[20:21], None, TOKENS[21:22], TOKENS[22:26]],
    [None, TOKENS[3:12], TOKENS[12:13], TOKENS[13:14], None],
    [None, None, TOKENS[5:6], None, TOKENS[6:9]],
]
"""Tokens of each rank in each step: other numbers, and sometimes none."""


@torch.inference_mode()
def logits(model: CausalLM, steps: Steps) -> torch.Tensor:
    """Return the logits of one sequence; a rank without tokens takes part in the exchange of others'."""
    paged = Paged(model, 1)
    parts = []
    for tokens in steps:
        if tokens is not None:
            parts += paged.step((0, tokens))
            continue
        for module in model.modules():
            if isinstance(module, MixtureOfExperts):
                assert module.mixed_without_tokens(torch.device("cpu")).shape[0] == 0
    return torch.cat(parts)


def check(directory: Path, size: int = 2, *, far: float = 2e-4, native: bool = False, **how: Any) -> None:
    """Check that each rank gives the logits of its sequence that one process gives."""

    def run(shard: Shard) -> torch.Tensor:
        model = load(directory, shard, **how)
        if native:
            assert use_native_projections(model, load_library())
        return logits(model, STEPS[shard.attention.rank])

    given = on_ranks(size, run, attention=True)
    for one, steps in zip(given, STEPS, strict=False):
        expected = logits(load(directory, WHOLE, **how), [tokens for tokens in steps if tokens is not None])
        torch.testing.assert_close(one, expected, atol=far, rtol=1e-4)


@pytest.mark.parametrize("name", [*(name for name in MIXTURES if name not in DENSE), *FUSED])
def test_two_ranks_give_what_one_process_gives(name: str, checkpoints: Checkpoints) -> None:
    check(checkpoints(name))


@pytest.mark.parametrize("name", HYBRIDS)
def test_mixtures_beside_recurrent_states(name: str, checkpoints: Checkpoints) -> None:
    check(checkpoints(name), far=1e-3)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3_moe"])
def test_three_ranks_of_which_one_is_idle_at_first(name: str, checkpoints: Checkpoints) -> None:
    check(checkpoints(name), 3)


def test_experts_of_latent_size(tmp_path: Path) -> None:
    check(make_checkpoint("nemotron_h", tmp_path, n_groups=2))


@pytest.mark.parametrize("kind", ["deepseek", "awq"])
def test_quantized_experts(kind: str, tmp_path: Path) -> None:
    config = CONFIG | {"num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 389} | MIXTURE
    write_checkpoint(kind, tmp_path / "model", config, GRAIN, full=("block_sparse_moe.gate",))
    check(tmp_path / "model")


@pytest.mark.skipif(bool(missing_library()), reason=missing_library())
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss/fused", "deepseek_v3_moe"])
def test_native_kernels_give_what_one_process_gives(name: str, checkpoints: Checkpoints) -> None:
    check(checkpoints(name), far=5e-4, native=True)


def test_a_rank_holds_all_but_the_experts_of_others(checkpoints: Checkpoints) -> None:
    whole, *ranks = (
        dict(load(checkpoints("deepseek_v3_moe"), shard).named_parameters())
        for shard in (WHOLE, *(with_attention_ranks(Shard(rank, 2)) for rank in range(2)))
    )
    for name, parameter in whole.items():
        parts = [rank[name].data for rank in ranks]
        if ".experts." in name:
            assert torch.equal(torch.cat(parts), parameter), name
        else:
            assert all(torch.equal(part, parameter) for part in parts), name


def test_splits_that_cannot_be_are_refused(checkpoints: Checkpoints) -> None:
    with pytest.raises(ValueError, match="--enable-dp-attention: LlamaForCausalLM has no experts"):
        build_model(load_config(checkpoints("llama")), "meta", with_attention_ranks(Shard(0, 2)))
    with pytest.raises(ValueError, match="--enable-dp-attention does not work with --pipeline-parallel-size"):
        with_attention_ranks(Shard(0, 2, stage=Stage(0, 2)))
    with pytest.raises(ValueError, match="5 experts cannot be placed on 6 ranks"):
        build_model(load_config(checkpoints("mixtral")), "meta", with_attention_ranks(Shard(0, 6)))
