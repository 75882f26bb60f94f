"""Gemma as it is served, chunk by chunk and beside others, against transformers with attention of its own."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from packages.scheduler.tests.models.families.test_families import Paged, load, some_tokens
from packages.scheduler.tests.models.test_hugging_face import SHAPE, assert_alike, expected, generate, options
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.model_files import ModelError
from tercet.scheduler.models.families.gemma.gemma import GemmaLayer
from tercet.scheduler.models.registry import load_config, parse_config

TEXT = {
    "head_dim": 16,
    "query_pre_attn_scalar": 10,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
SIGHT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}


def config_of(name: str) -> Any:
    """A small config of transformers' own."""
    if name == "Gemma2":
        caps = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 20.0}
        return transformers.Gemma2Config(**(SHAPE | TEXT | caps))
    text = transformers.Gemma3TextConfig(**(SHAPE | TEXT), rope_parameters=ROPES)
    if name == "Gemma3":
        return text
    sight = {"model_type": "siglip_vision_model", **SIGHT, "image_size": 28, "patch_size": 14}
    return transformers.Gemma3Config(text_config=text.to_dict(), vision_config=sight, mm_tokens_per_image=4)


def make(name: str, directory: Path, *, old: bool = True) -> Path:
    """A random checkpoint in float32, whose norms are no zeros; in the `old` form names are those of transformers 4."""
    kind = "Gemma3ForConditionalGeneration" if name == "Gemma3 with eyes" else f"{name}ForCausalLM"
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = getattr(transformers, kind)(config_of(name))
        for path, parameter in model.named_parameters():
            if "norm" in path and "vision" not in path:
                torch.nn.init.normal_(parameter, 0.0, 0.3)
    model.save_pretrained(directory, save_original_format=old)
    return directory


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes each checkpoint once."""
    directories: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in directories:
            directories[name] = make(name, tmp_path_factory.mktemp(name.replace(" ", "-")))
        return directories[name]

    return of


def is_own(worker: TpModelWorker) -> bool:
    """Whether a worker on torch has modules of ours."""
    model: Any = worker._runner._model
    return any(isinstance(module, GemmaLayer) for module in model.modules())


@pytest.mark.parametrize("name", ["Gemma2", "Gemma3", "Gemma3 with eyes"])
@pytest.mark.parametrize("backend", ["torch_native", "auto"])
def test_says_what_transformers_says(name: str, backend: str, made: Callable[[str], Path]) -> None:
    worker = TpModelWorker(options(made(name), attention_backend=backend))
    actual = generate(worker, 16)
    worker.close()
    assert_alike(actual, expected(made(name), 16))


def test_what_images_are_read_with_is_left_in_the_checkpoint(
    made: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever names the checkpoint has; and of what is read all is checked as ever."""
    new = make("Gemma3 with eyes", tmp_path / "new", old=False)
    texts = []
    for directory in (made("Gemma3 with eyes"), new):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            worker = TpModelWorker(options(directory))
        assert sum("tensors of encoders" in line for line in caplog.messages) == 1
        texts.append(generate(worker, 4))
        worker.close()
    assert texts[0] == texts[1]
    config = json.loads((new / "config.json").read_text())
    config["text_config"] |= {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5}
    (new / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"missing: model\.layers\.4"):
        TpModelWorker(options(new))


GEMMA2, GEMMA3 = ({"architectures": [f"Gemma{number}ForCausalLM"]} for number in (2, 3))
EYES = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"num_hidden_layers": 7}}
SAME = ("hidden_size", "intermediate_size", "vocab_size", "head_dim", "rms_norm_eps", "tie_word_embeddings")


@pytest.mark.parametrize(
    ("said", "theirs"),
    [
        (GEMMA2, transformers.Gemma2Config()),
        (GEMMA2 | {"attn_logit_softcapping": None}, transformers.Gemma2Config(attn_logit_softcapping=None)),
        (GEMMA3, transformers.Gemma3TextConfig()),
        (GEMMA3 | {"sliding_window_pattern": 4}, transformers.Gemma3TextConfig(sliding_window_pattern=4)),
        (EYES, transformers.Gemma3Config(text_config={"num_hidden_layers": 7}).get_text_config()),
    ],
)
def test_fields_left_out_mean_what_they_mean_to_transformers(said: dict[str, Any], theirs: Any) -> None:
    ours = parse_config(said, {})
    assert [getattr(ours, name) for name in SAME] == [getattr(theirs, name) for name in SAME]
    assert (ours.layers, ours.heads) == (theirs.num_hidden_layers, theirs.num_attention_heads)
    assert (ours.kv_heads, ours.context_length) == (theirs.num_key_value_heads, theirs.max_position_embeddings)
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.attention_scale == theirs.query_pre_attn_scalar**-0.5
    assert (ours.softcap or None, ours.logit_softcap or None) == (
        theirs.attn_logit_softcapping,
        theirs.final_logit_softcapping,
    )
    slides = ["sliding_attention" if window else "full_attention" for window in ours.windows]
    assert (slides, max(ours.windows)) == (theirs.layer_types, theirs.sliding_window)
    ropes = theirs.rope_parameters
    assert ours.rope.theta == ropes.get("full_attention", ropes)["rope_theta"]
    if ours.local_rope is not None:
        assert ours.local_rope.theta == ropes["sliding_attention"]["rope_theta"]
    assert (ours.local_rope is None) == ("rope_theta" in ropes)


def test_what_is_said_of_the_whole_model_counts() -> None:
    eyes = EYES | {"eos_token_id": [1, 106], "torch_dtype": "bfloat16"}
    config = parse_config(eyes, {})
    assert (config.eos_token_ids, config.dtype, config.layers) == ((1, 106), torch.bfloat16, 7)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GEMMA2 | {"hidden_activation": "gelu"}, "hidden_activation: 'gelu' is not supported"),
        (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention: "),
        (GEMMA3 | {"layer_types": ["full_attention"]}, "layer_types: "),
        (GEMMA3 | {"rope_parameters": {"rope_type": "default"}}, "rope_parameters: must say of full_attention and sl"),
        (GEMMA3 | {"rope_parameters": {"full_attention": 3}}, "rope_parameters.full_attention: is not an object"),
        (GEMMA3 | {"rope_scaling": [1]}, "rope_parameters.full_attention: is not an object"),
        (GEMMA3 | {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: 0 is not a positive number"),
        (GEMMA3 | {"sliding_window_pattern": 0}, "sliding_window_pattern: 0 is not"),
        (GEMMA2 | {"attn_logit_softcapping": "50"}, "attn_logit_softcapping: '50' is not"),
        (EYES | {"text_config": 3}, "text_config: is not an object"),
        (EYES | {"auto_map": {"AutoModel": "evil.Model"}}, "auto_map: .* never runs"),
    ],
)
def test_nonsense_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_config(config, {})


def test_modules_are_our_own(made: Callable[[str], Path]) -> None:
    for name in ("Gemma2", "Gemma3", "Gemma3 with eyes"):
        worker = TpModelWorker(options(made(name), attention_backend="torch_native"))
        assert is_own(worker)
        assert load_config(made(name)).layers == 4
        worker.close()


def test_the_text_model_of_a_gemma_3n_that_sees_and_hears(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    plain = checkpoints("gemma3n")
    tensors = load_file(plain / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): each for name, each in tensors.items()}
    towers = {f"model.{tower}.weight": torch.ones(2) for tower in ("vision_tower.x", "audio_tower.x", "embed_vision.x")}
    save_file(renamed | towers, tmp_path / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    config = {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": config, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokens = some_tokens(20, 2)
    [wanted], [found] = (Paged(load(directory), 1).step((0, tokens)) for directory in (plain, tmp_path))
    assert torch.equal(found, wanted)
