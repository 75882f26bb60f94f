"""Every architecture over several ranks, each with its part of the weights, against the same in one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from packages.scheduler.tests.conftest import ALL, MIXTURES, SHARDED, make_checkpoint
from packages.scheduler.tests.models.families.test_families import Paged, some_tokens
from packages.scheduler.tests.models.families.test_gpt_oss import CONFIG as GPT_OSS
from packages.scheduler.tests.models.weights.test_quantized_checkpoints import CONFIG, GRAIN, MIXTURE
from tercet.scheduler.models.layers.decoder import CausalLM
from tercet.scheduler.models.layers.shard import WHOLE, Cut, Shard
from tercet.scheduler.models.registry import build_model, load_config
from tercet.scheduler.models.weights.weights import load_weights
from tercet.scheduler.testing.mxfp4_checkpoints import write_mxfp4
from tercet.scheduler.testing.quantized_checkpoints import KINDS, write_checkpoint
from tercet.scheduler.testing.thread_ranks import on_ranks

Checkpoints = Callable[[str], Path]
WHOLE_ALONE = {"llama_tied", "llama_tied/sharded", "qwen3", "minimax_m2", "olmoe"}
"""Checkpoints with an odd number of heads, and one of a family that normalises all heads as one."""
SPLIT = [name for name in [*ALL, *SHARDED] if name not in WHOLE_ALONE]
TOKENS = some_tokens(37, 5)


def load(directory: Path, shard: Shard, *, dequantized: bool = False) -> CausalLM:
    model = build_model(load_config(directory), shard=shard)
    load_weights(model, directory, dequantized=dequantized)
    return model


def logits(model: CausalLM) -> torch.Tensor:
    """Of a chunk, decodes and another sequence beside them."""
    paged = Paged(model, 2)
    parts = paged.step((0, TOKENS[:20]))
    parts += paged.step((0, TOKENS[20:21]), (1, TOKENS[:9]))
    parts += paged.step((0, TOKENS[21:22]), (1, TOKENS[9:10]))
    return torch.cat(parts)


def check(directory: Path, size: int, **how: Any) -> None:
    """Each rank gives the logits of one process, and all the same bits."""
    expected = logits(load(directory, WHOLE, **how))
    first, *others = on_ranks(size, lambda shard: logits(load(directory, shard, **how)))
    torch.testing.assert_close(first, expected, atol=2e-4, rtol=1e-4)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("name", [*SPLIT, *(f"{name}/fused" for name in MIXTURES if name not in WHOLE_ALONE)])
def test_two_ranks_give_what_one_process_gives(name: str, checkpoints: Checkpoints) -> None:
    check(checkpoints(name), 2)


@pytest.mark.parametrize(
    "name", ["qwen3_next", "qwen3_5", "lfm2", "granite_hybrid", "mamba2", "mamba", "kimi_linear_dense"]
)
def test_recurrent_states_are_split_by_heads(name: str, checkpoints: Checkpoints) -> None:
    check(checkpoints(name), 2)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("falcon_h1_normed", {"mamba_n_groups": 2}),
        ("nemotron_h", {"n_groups": 2}),
        ("granite_hybrid", {"mamba_n_groups": 1}),
    ],
)
def test_groups_of_states_are_split_or_shared(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """If ranks share a group, its norm is over the outputs of all of them."""
    check(make_checkpoint(name, tmp_path, **changes), 2)


@pytest.mark.parametrize("tied", [False, True])
def test_key_value_heads_are_shared_where_there_are_more_ranks(tied: bool, tmp_path: Path) -> None:
    """Of 8 heads each rank has 2; two ranks each have the same one of 2 key-value heads."""
    sizes = {"hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 2, "vocab_size": 389, "head_dim": 6}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 128}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, **heads, initializer_range=0.3, tie_word_embeddings=tied)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    check(tmp_path, 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["apart", "fused", "experts"])
@pytest.mark.parametrize("dequantized", [False, True])
def test_quantised_layers_are_cut(kind: str, form: str, dequantized: bool, tmp_path: Path) -> None:
    """Between their groups and blocks."""
    forms: dict[str, dict[str, Any]] = {
        "apart": {},
        "fused": {"architectures": ["Phi3ForCausalLM"]},
        "experts": MIXTURE,
    }
    more = forms[form]
    config = CONFIG | {"num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 389} | more
    write_checkpoint(kind, tmp_path / "model", config, GRAIN, full=("block_sparse_moe.gate",))
    check(tmp_path / "model", 2, dequantized=dequantized)


@pytest.mark.parametrize("dequantized", [False, True])
def test_experts_as_gpt_oss_is_published_are_cut(dequantized: bool, tmp_path: Path) -> None:
    write_mxfp4(tmp_path / "model", GPT_OSS | {"intermediate_size": 128, "vocab_size": 389})
    check(tmp_path / "model", 2, dequantized=dequantized)


def test_each_rank_holds_its_part_alone(checkpoints: Checkpoints) -> None:
    def held(shard: Shard) -> int:
        return sum(parameter.numel() for parameter in load(checkpoints("qwen2"), shard).parameters())

    whole, parts = held(WHOLE), on_ranks(2, held)
    norms = (2 * 3 + 1) * 48
    assert sum(parts) == whole + norms


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qwen3", "5 attention heads cannot be split over 2 processes"),
        ("olmoe", "heads that are normalised as one cannot be split over processes"),
        ("kimi_linear", "3 key heads of recurrent states cannot be split over 2 processes"),
        ("falcon_h1", "3 groups of recurrent states cannot be split over 2 processes"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(name: str, message: str, checkpoints: Checkpoints) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(load_config(checkpoints(name)), shard=Shard(0, 2))


def test_groups_that_would_be_cut_are_refused(tmp_path: Path) -> None:
    """96 columns in groups of 32 are three."""
    write_checkpoint("gptq", tmp_path / "model", CONFIG | {"num_key_value_heads": 2}, GRAIN)
    with pytest.raises(ValueError, match="columns 0 to 48 are not whole units of 32"):
        on_ranks(2, lambda shard: load(tmp_path / "model", shard))


def test_a_cut_below_another() -> None:
    stored = torch.arange(20)
    above, below = Cut.span(4, range(2, 4), each=2), Cut.span(6, range(3), each=2)
    both = below.stacked_below(above)
    assert both.of(stored).tolist() == [4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    assert (both.held, both.stored_shape([10, 3])) == (10, (20, 3))


def test_cuts_that_adjoin_are_one_run_which_is_no_copy() -> None:
    stored = torch.arange(20)
    assert Cut.all(12).stacked_below(Cut.all(8)).of(stored).data_ptr() == stored.data_ptr()
    apart = Cut.span(12, range(1, 3)).stacked_below(Cut.span(8, range(2)))
    assert apart.of(stored).tolist() == [0, 1, 9, 10]


def test_a_vocabulary_that_is_no_multiple() -> None:
    spans = [Shard(rank, 4).uneven_span(10) for rank in range(4)]
    assert spans == [range(3), range(3, 6), range(6, 9), range(9, 10)]
    pieces = torch.arange(20).view(2, 10)
    whole = on_ranks(4, lambda shard: shard.gather_columns(pieces[:, shard.uneven_span(10)], 10))
    assert all(torch.equal(rows, pieces) for rows in whole)
