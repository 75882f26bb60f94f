"""Architectures in pipeline stages, each with its layers' weights alone, against the same in one process."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from packages.scheduler.tests.models.families.test_families import Paged
from packages.scheduler.tests.models.test_tensor_parallel import TOKENS, load
from tercet.scheduler.models.layers.decoder import AbsentLayer, CausalLM
from tercet.scheduler.models.layers.shard import WHOLE, Shard, Stage
from tercet.scheduler.models.registry import build_model, load_config
from tercet.scheduler.models.weights.weights import check_weights
from tercet.scheduler.testing.thread_ranks import on_ranks

Checkpoints = Callable[[str], Path]
NAMES = ["llama", "qwen3", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3_moe", "gemma3", "granite"]


def hidden(model: CausalLM) -> list[torch.Tensor]:
    """Run a chunk, decodes and another sequence beside them."""
    paged = Paged(model, 2)
    parts = paged.hidden((0, TOKENS[:20]))
    parts += paged.hidden((0, TOKENS[20:21]), (1, TOKENS[:9]))
    parts += paged.hidden((0, TOKENS[21:22]), (1, TOKENS[9:10]))
    return parts


def logits(model: CausalLM) -> torch.Tensor:
    """Return those of the last stage; hidden states of others."""
    outputs = torch.cat(hidden(model))
    return model.compute_logits(outputs) if model.shard.stage.is_last else outputs


@pytest.mark.parametrize("name", NAMES)
def test_stages_give_what_one_process_gives(name: str, checkpoints: Checkpoints) -> None:
    expected = logits(load(checkpoints(name), WHOLE))
    _, last = on_ranks(1, lambda shard: logits(load(checkpoints(name), shard)), stages=2)
    assert torch.equal(last, expected)


def test_three_stages_of_two_ranks_give_the_same(checkpoints: Checkpoints) -> None:
    expected = logits(load(checkpoints("llama"), WHOLE))
    *_, one, other = on_ranks(2, lambda shard: logits(load(checkpoints("llama"), shard)), stages=3)
    torch.testing.assert_close(one, expected, atol=2e-4, rtol=1e-4)
    assert torch.equal(one, other)


def test_a_tied_embedding_is_in_the_first_and_the_last_stage(checkpoints: Checkpoints) -> None:
    expected = logits(load(checkpoints("llama_tied"), WHOLE))

    def run(shard: Shard) -> tuple[set[str], torch.Tensor]:
        model = load(checkpoints("llama_tied"), shard)
        return {name.split(".")[1] for name, _ in model.named_parameters()}, logits(model)

    first, middle, last = on_ranks(1, run, stages=3)
    assert (first[0], middle[0], last[0]) == (
        {"embed_tokens", "layers"},
        {"layers"},
        {"embed_tokens", "layers", "norm"},
    )
    assert torch.equal(last[1], expected)


def test_a_stage_has_its_own_layers_alone(checkpoints: Checkpoints) -> None:
    directory = checkpoints("llama")
    whole = dict(load(directory, WHOLE).named_parameters())
    seen: list[str] = []
    for number in range(2):
        stage = load(directory, Shard(stage=Stage(number, 2)))
        assert [isinstance(layer, AbsentLayer) for layer in stage.model.layers] == [
            [False, False, True],
            [True, True, False],
        ][number]
        for name, parameter in stage.named_parameters():
            assert torch.equal(parameter, whole[name]), name
            seen.append(name)
        check_weights(stage, directory)
    assert sorted(seen) == sorted(whole)


def test_layers_are_split_evenly() -> None:
    assert [[*Stage(number, 3).layers(7)] for number in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [len(Stage(number, 4).layers(80)) for number in range(4)] == [20] * 4
    with pytest.raises(ValueError, match="2 layers cannot be split over 3 pipeline stages"):
        Stage(0, 3).layers(2)


@pytest.mark.parametrize(
    ("name", "words"),
    [("gemma4", "its layers share inputs or caches"), ("qwen3_next", "it has recurrent states")],
)
def test_models_that_cannot_be_staged_are_refused(name: str, words: str, checkpoints: Checkpoints) -> None:
    config = load_config(checkpoints(name))
    with pytest.raises(ValueError, match=rf"{config.architecture} runs .*: {words}"):
        build_model(config, shard=Shard(stage=Stage(0, 2)))


def test_ranks_of_all_stages_compare_a_number() -> None:
    cases = {(7, 7, 7, 7): True, (7, 7, 8, 7): False, (0, 0, 0, 0): False, (7, 0, 7, 7): False}

    def run(shard: Shard) -> list[bool]:
        return [shard.all_equal(numbers[2 * shard.stage.number + shard.rank]) for numbers in cases]

    assert on_ranks(2, run, stages=2) == [[*cases.values()]] * 4
    assert WHOLE.all_equal(3)
