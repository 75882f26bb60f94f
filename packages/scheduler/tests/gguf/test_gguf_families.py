"""Every architecture from a GGUF file against the checkpoint that the file was written from."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from packages.scheduler.tests.conftest import SENTENCES
from packages.scheduler.tests.gguf.gguf_checkpoints import write_gguf
from packages.scheduler.tests.models.families.test_families import Paged, load, some_tokens
from tercet.scheduler.gguf.gguf_file import read_gguf
from tercet.scheduler.gguf_models import resolve_any_model, served_name
from tercet.scheduler.model_files import ModelError, model_identity, tokenizer_files

UNSAID: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 20, "layer_types": None},
    "gemma3": {"query_pre_attn_scalar": 20, "layer_types": None},
    "smollm3": {"no_rope_layers": None},
    "gpt_oss": {"layer_types": None},
    "mixtral": {"sliding_window": None},
    "qwen3_moe_sliding": {"use_sliding_window": False, "layer_types": None, "norm_topk_prob": True},
}
"""Fields that GGUF has no place for: llama.cpp has one value for each architecture. None leaves the field out."""
FAMILIES = [
    "llama_linear",
    "llama_tied",
    "llama_yarn",
    "llama3_rope",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "granite",
    "granite_biases",
    "smollm3",
    "phi3",
    "phi3_longrope",
    "deepseek_v2",
    "deepseek_v2_greedy",
    "deepseek_v2_moe",
    "deepseek_v3",
    "deepseek_v3_moe",
    "mixtral",
    "gpt_oss",
    "qwen3_moe_sliding",
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories that stand for GGUF files are made in an empty folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def said(family: str, source: Path, directory: Path) -> Path:
    """A checkpoint whose config.json says what a GGUF file can say."""
    directory.mkdir()
    for file in source.iterdir():
        if file.name != "config.json":
            (directory / file.name).symlink_to(file)
    config = json.loads((source / "config.json").read_text())
    for name, value in UNSAID.get(family, {}).items():
        if value is None:
            config.pop(name, None)
        else:
            config[name] = value
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_a_file_may_have_any_name(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    """Ollama's blobs are named by their hash."""
    blob = write_gguf(checkpoints("llama_tied"), tmp_path / "m.gguf").rename(tmp_path / "sha256-0a1b")
    served = resolve_any_model(str(blob))
    assert served_name(str(blob), served) == "sha256-0a1b"
    assert model_identity(served, "float32").weights
    (tmp_path / "sha256-2c3d").write_bytes(b"{}")
    with pytest.raises(ModelError, match="is a file: a model is a directory"):
        resolve_any_model(str(tmp_path / "sha256-2c3d"))


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_its_checkpoint(family: str, checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    directory = said(family, checkpoints(family), tmp_path / family)
    served = resolve_any_model(str(write_gguf(directory, tmp_path / "model.gguf")))
    tokens = some_tokens(41, 1)
    expected, actual = (Paged(load(path), 1).step((0, tokens))[0] for path in (directory, served))
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def test_a_tokenizer_and_template_come_with_it(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    directory = checkpoints("qwen3")
    served = resolve_any_model(str(write_gguf(directory, tmp_path / "model.gguf")))
    files, original = tokenizer_files(served), tokenizer_files(directory)
    assert files["chat_template.jinja"] == original["chat_template.jinja"]
    ours, theirs = (Tokenizer.from_str(each["tokenizer.json"].decode()) for each in (files, original))
    for text in [*SENTENCES, "<|user|>def f(x):\n\treturn  x**2<|end|>", "", "  "]:
        assert ours.encode(text).ids == theirs.encode(text).ids
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text


def test_identity_changes_with_the_weights(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    path = write_gguf(checkpoints("qwen3"), tmp_path / "model.gguf")
    before = model_identity(resolve_any_model(str(path)), "float32").weights
    assert model_identity(resolve_any_model(str(tmp_path)), "float32").weights == before
    tensor = read_gguf(path).tensors["blk.1.ffn_up.weight"]
    with path.open("r+b") as file:
        file.seek(tensor.start)
        file.write(bytes(16))
    assert model_identity(resolve_any_model(str(path)), "float32").weights != before
