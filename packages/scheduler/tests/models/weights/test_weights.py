import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tercet.protocol.messages.values import Task
from tercet.scheduler.model_files import ModelError, read_header, weight_files
from tercet.scheduler.models.layers.decoder import CausalLM
from tercet.scheduler.models.layers.layers import Rotary
from tercet.scheduler.models.layers.linear import Linear
from tercet.scheduler.models.layers.norms import CenteredNorm
from tercet.scheduler.models.registry import build_encoder, build_model, load_config
from tercet.scheduler.models.weights.checkpoint_names import text_names
from tercet.scheduler.models.weights.weights import checkpoint_tensors, dummy_weights, load_weights

Checkpoints = Callable[[str], Path]
Tensors = dict[str, torch.Tensor]


def fresh(directory: Path, dtype: str = "auto") -> CausalLM:
    return build_model(load_config(directory, dtype))


def edited(source: Path, target: Path, edit: Callable[[Tensors], object]) -> Path:
    """A copy of a checkpoint, its tensors changed."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    edit(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def test_every_stored_tensor_arrives_where_its_name_says(family: Path) -> None:
    model = fresh(family)
    for module in model.modules():
        if isinstance(module, Linear | Rotary):
            module.order = None  # rows stay where they are stored
    load_weights(model, family)
    path = family / "model.safetensors"
    tensors, header = load_file(path), read_header(path)
    names = text_names(tensors)
    stored = {name: tensors[there] for there, name in names.items()}
    loaded = checkpoint_tensors(model, {name: header[there] for there, name in names.items()})
    assert loaded.keys() == stored.keys()
    sums = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, CenteredNorm)}
    for name, tensor in stored.items():
        interleaved = family.name == "gpt_oss" and ".gate_up_proj" in name
        here = torch.cat([tensor[..., ::2], tensor[..., 1::2]], -1) if interleaved else tensor + (name in sums)
        assert torch.equal(loaded[name].memory, here), name


def test_projections_of_one_input_share_one_matrix(checkpoints: Checkpoints) -> None:
    model = fresh(checkpoints("llama"))
    load_weights(model, checkpoints("llama"))
    stored = load_file(checkpoints("llama") / "model.safetensors")
    prefix = "model.layers.1.self_attn"
    for kind in ("weight", "bias"):
        fused = torch.cat([stored[f"{prefix}.{part}_proj.{kind}"] for part in "qkv"])
        assert torch.equal(model.get_parameter(f"{prefix}.qkv_proj.{kind}"), fused)


@pytest.mark.parametrize("name", ["llama/sharded", "llama_tied/sharded"])
def test_shards_are_the_whole(name: str, checkpoints: Checkpoints) -> None:
    assert len(weight_files(checkpoints(name))) > 2
    sharded, whole = fresh(checkpoints(name)), fresh(checkpoints(name))
    load_weights(sharded, checkpoints(name))
    load_weights(whole, checkpoints(name.removesuffix("/sharded")))
    pairs = zip(sharded.parameters(), whole.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_progress_counts_every_byte(checkpoints: Checkpoints) -> None:
    reports: list[tuple[int, int]] = []
    directory = checkpoints("llama/sharded")
    load_weights(fresh(directory), directory, lambda done, total: reports.append((done, total)))
    bytes_done = [done for done, _ in reports]
    expected = sum(tensor.nbytes for file in weight_files(directory) for tensor in load_file(file).values())
    assert bytes_done == sorted(bytes_done)
    assert reports[-1] == (expected, expected)
    assert len(reports) == 3 + 3 * (9 + 7)  # 3 layers of 9 weights and 7 biases


def test_weights_are_cast(checkpoints: Checkpoints) -> None:
    model = fresh(checkpoints("qwen3"), "bfloat16")
    load_weights(model, checkpoints("qwen3"))
    stored = load_file(checkpoints("qwen3") / "model.safetensors")
    norm = model.get_parameter("model.layers.0.self_attn.q_norm.weight")
    assert torch.equal(norm, stored["model.layers.0.self_attn.q_norm.weight"].bfloat16())


def test_all_that_does_not_fit_is_listed_at_once(checkpoints: Checkpoints, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        del tensors["model.norm.weight"], tensors["model.layers.2.mlp.up_proj.weight"]
        tensors["model.layers.3.mlp.up_proj.weight"] = torch.zeros(2)
        tensors["lm_head.weight"] = torch.zeros(388, 48)

    directory = edited(checkpoints("llama"), tmp_path / "model", edit)
    model = fresh(directory)
    model.model.norm.weight.fill_(7.0)
    with pytest.raises(ModelError) as caught:
        load_weights(model, directory)
    assert str(caught.value) == (
        f"{directory} does not fit its config.json: "
        "missing: model.layers.2.mlp.up_proj.weight, model.norm.weight; "
        "unexpected: model.layers.3.mlp.up_proj.weight; "
        "of the wrong shape: lm_head.weight [388, 48] instead of [389, 48]"
    )
    assert (model.model.norm.weight == 7.0).all()


def test_a_bias_the_architecture_lacks_is_unexpected(checkpoints: Checkpoints, tmp_path: Path) -> None:
    directory = shutil.copytree(checkpoints("qwen2"), tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "architectures": ["MistralForCausalLM"]}))
    with pytest.raises(ModelError, match=r"unexpected: model\.layers\.0\.self_attn\.k_proj\.bias, "):
        load_weights(fresh(directory), directory)


def test_a_tensor_stored_twice(checkpoints: Checkpoints, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(checkpoints("llama/sharded"), directory)
    save_file({"model.norm.weight": torch.ones(48)}, directory / "extra.safetensors")
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = "extra.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"stored twice: model\.norm\.weight$"):
        load_weights(fresh(directory), directory)


def test_frequencies_that_old_checkpoints_saved_are_passed_over(checkpoints: Checkpoints, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    directory = edited(checkpoints("llama"), tmp_path / "model", lambda tensors: tensors.update({name: torch.ones(4)}))
    model, whole = fresh(directory), fresh(directory)
    load_weights(model, directory)
    load_weights(whole, checkpoints("llama"))
    assert torch.equal(model.model.norm.weight, whole.model.norm.weight)


def test_a_tied_head_may_be_stored_too(checkpoints: Checkpoints, tmp_path: Path) -> None:
    def equal(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def different(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    same = edited(checkpoints("llama_tied"), tmp_path / "same", equal)
    load_weights(fresh(same, "bfloat16"), same)
    other = edited(checkpoints("llama_tied"), tmp_path / "other", different)
    with pytest.raises(ModelError, match=r"lm_head\.weight is not the embedding"):
        load_weights(fresh(other), other)


def test_dummy_weights_are_small_random_and_the_same_again(checkpoints: Checkpoints) -> None:
    one, again, other = (fresh(checkpoints("qwen3"), "bfloat16") for _ in range(3))
    dummy_weights(one)
    dummy_weights(again)
    dummy_weights(other, seed=1)
    embedding = "model.embed_tokens.weight"
    assert torch.equal(one.get_parameter(embedding), again.get_parameter(embedding))
    assert not torch.equal(one.get_parameter(embedding), other.get_parameter(embedding))
    assert 0.019 < one.get_parameter(embedding).float().std() < 0.021
    assert all((norm == 1).all() for name, norm in one.named_parameters() if "norm" in name)


def test_norms_of_a_dummy_encoder_are_1_too() -> None:
    shape = {"vocab_size": 90, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = build_encoder({"architectures": ["BertModel"], **shape}, Task.EMBED).module
    dummy_weights(model)
    norms = [weight for name, weight in model.named_parameters() if name.endswith("LayerNorm.weight")]
    assert len(norms) == 5
    assert all((weight == 1).all() for weight in norms)


def test_dummy_weights_of_a_matrix_larger_than_the_block(checkpoints: Checkpoints) -> None:
    config = load_config(checkpoints("llama_tied"))
    model = build_model(config)
    model.model.embed_tokens.weight = torch.nn.Parameter(torch.full((30000, 48), torch.nan), requires_grad=False)
    dummy_weights(model)
    weight = model.model.embed_tokens.weight
    assert torch.isfinite(weight).all()
    assert len({row.numpy().tobytes() for row in weight}) == 30000
