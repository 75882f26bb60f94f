"""Directories, names and files that are no model: each is recognized in one line that says what to do."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tercet.scheduler.config import ModelOptions
from tercet.scheduler.formats.downloads import HEAD, download_fault
from tercet.scheduler.formats.other_models import hub_fault, model_fault
from tercet.scheduler.model_files import ModelError, check_model, read_header, resolve_model
from tercet.scheduler.resolved_model import resolve_served_model

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1234567\n"
PAGE = b"\n<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>"
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def refusal(directory: Path | str) -> str:
    with pytest.raises(ModelError) as caught:
        resolve_served_model(ModelOptions(model=str(directory), device="cpu"))
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("names", "fault"),
    [
        ("", "is empty"),
        ("adapter_config.json adapter_model.safetensors tokenizer.json", "is an adapter, not a model"),
        ("config.json adapter_config.json adapter_model.safetensors", "is an adapter, not a model"),
        ("checkpoint-5/adapter_config.json", "holds adapters, which are served beside a model: checkpoint-5"),
        ("model_index.json unet/config.json vae/config.json", "is a pipeline of diffusers"),
        ("modules.json 0_Transformer/config.json 1_Pooling/config.json", "whose transformer is not beside"),
        ("modules.json 0_StaticEmbedding/model.safetensors", "whose transformer is not beside"),
        ("llama/config.json llama/model.safetensors README.md", "a sub-directory that may be the model"),
        ("snapshots/0a/config.json snapshots/0a/vision/config.json refs/main", "name that one: snapshots/0a"),
        ("a/config.json b/config.json c/config.json d/config.json", "name that one: a, b, c, 1 more"),
        ("config.json pytorch_model.bin tokenizer.json", "holds pickled weights only"),
        ("config.json model.pth", "holds pickled weights only"),
        ("config.json onnx/model.onnx onnx/model_q4.onnx", "holds ONNX weights only"),
        ("config.json tf_model.h5", "holds weights of TensorFlow or Flax only"),
        ("config.json flax_model.msgpack", "holds weights of TensorFlow or Flax only"),
        ("config.json rank0.engine", "holds a TensorRT engine"),
        ("model.litertlm", "holds a model for phones"),
        ("params.json consolidated.safetensors tekken.json", "in its maker's own format"),
        ("data/train-00000.parquet README.md", "looks like a dataset"),
        ("dataset_dict.json train/state.json", "looks like a dataset"),
        ("app.py requirements.txt README.md", "looks like a Space"),
        ("tokenizer.json tokenizer_config.json", "holds a tokenizer and no model"),
        ("model.safetensors", "holds weights without their config.json"),
        ("config.json model.safetensors.incomplete", "its download has not ended"),
        ("model.safetensors.part", "its download has not ended"),
        ("config.json tokenizer.json model.safetensors.index.json", "lacks the weights that its"),
        ("config.json tokenizer.json", "holds neither model.safetensors nor"),
        ("notes.txt", "a model is a directory with one"),
    ],
)
def test_files_that_are_no_model(names: str, fault: str, tmp_path: Path) -> None:
    assert fault in model_fault(names.split())
    for name in names.split():
        path = tmp_path / "model" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(LLAMA))
    (tmp_path / "model").mkdir(exist_ok=True)
    message = refusal(tmp_path / "model")
    assert message.startswith(str(tmp_path / "model"))
    assert fault in message.replace("is an adapter of", "is an adapter, not a model")


def test_a_repository_of_gguf_files_is_named_with_a_file() -> None:
    expected = "holds GGUF files: name one of them behind a colon, as in :a.Q4_1.gguf"
    assert hub_fault(["mmproj-a.gguf", "a.Q8_0.gguf", "a.Q4_1.gguf", "README.md"]) == expected
    assert hub_fault(["a.Q4_1.gguf", "config.json"]) == expected
    assert hub_fault(["a.Q4_1.gguf", "config.json", "model.safetensors"]) == ""
    assert hub_fault(["README.md"]) == model_fault(["README.md"])


def test_a_model_is_one(checkpoints: Callable[[str], Path]) -> None:
    for name in ("llama", "llama/sharded"):
        check_model(checkpoints(name))
    assert model_fault(["config.json", "model.safetensors", "pytorch_model.bin", "onnx/model.onnx"]) == ""
    assert model_fault(["config.json", "tokenizer.json"], weights=False) == ""


def test_an_adapter_names_its_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "meta/llama"}))
    expected = f"{tmp_path} is an adapter of 'meta/llama', not a model: serve that with --lora NAME={tmp_path}"
    assert refusal(tmp_path) == expected
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": None}))
    assert refusal(tmp_path).endswith("serve the model that it was trained for with --lora NAME=DIRECTORY")


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ({"_class_name": "UNet2DConditionModel", "_diffusers_version": "0.3"}, "belongs to a pipeline of diffusers"),
        ({"word_embedding_dimension": 8, "pooling_mode_mean_tokens": True}, "belongs to a module of a sentence"),
        ({"in_features": 8, "out_features": 4, "bias": True}, "belongs to a module of a sentence"),
        ({"error": "Repository not found"}, "holds an error message instead of the file, 'Repository not found'"),
    ],
    ids=str,
)
def test_a_config_of_something_else(config: dict[str, Any], fault: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    assert fault in refusal(tmp_path)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (POINTER, "is a pointer of git-lfs, not the file itself: run `git lfs pull`"),
        (PAGE, "is a web page, saved in place of the file"),
        (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "is a web page"),
        (b"", "is empty: download it again"),
        (b"Entry not found", "holds a message instead of the file, 'Entry not found'"),
        (b"Access to model x is restricted.\nPlease log in.", "'Access to model x is restricted. Please log in.'"),
        (b"GGUF\x03\0\0\0", "is a GGUF file"),
        (b"PK\x03\x04\0\0", "is a zip archive"),
        (b"\x1f\x8b\x08\0", "is a gzip archive"),
    ],
    ids=lambda value: str(value)[:20],
)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "generation_config.json"])
def test_a_download_in_place_of_a_file(
    name: str, content: bytes, fault: str, checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = shutil.copytree(checkpoints("llama"), tmp_path / "model")
    (directory / name).write_bytes(content)
    message = refusal(directory)
    assert message.startswith(str(directory / name))
    assert fault in message
    if name == "model.safetensors":
        with pytest.raises(ModelError, match=name):
            read_header(directory / name)


def test_small_files_of_every_kind_are_taken(checkpoints: Callable[[str], Path]) -> None:
    for length in range(8, 200):
        head = length.to_bytes(8, "little") + b"{}".ljust(length)
        assert download_fault(head[:HEAD], len(head), ".safetensors") == ""
    assert download_fault(b"", 0, ".jinja") == ""
    assert download_fault(b"hello", 5, ".jinja") == ""
    for path in checkpoints("llama").iterdir():
        assert download_fault(path.read_bytes()[:HEAD], path.stat().st_size, path.suffix) == ""


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("https://hub.example/meta/llama", "which may be 'meta/llama'"),
        ("https://hub.example/meta/llama/tree/main", "which may be 'meta/llama'"),
        ("https://hub.example/meta/llama.git", "which may be 'meta/llama'"),
        ("https://hub.example/datasets/meta/words", "is the address of a dataset"),
        ("https://hub.example/spaces/meta/chat", "is the address of a space"),
        ("meta/llama:latest", "may be 'meta/llama'"),
        ("meta/llama@main", "may be 'meta/llama'"),
        ("hf:meta/llama", "names no GGUF file: add one, as in hf:OWNER/REPO:FILE.gguf"),
    ],
)
def test_a_name_in_another_notation(name: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert fault in refusal(name)


@pytest.mark.parametrize(
    ("name", "fault"),
    [("m.tar.gz", "is an archive"), ("model.safetensors", "name its directory")],
)
def test_a_file_in_place_of_a_directory(name: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(ModelError, match=fault):
        resolve_model(str(tmp_path / name))


def test_a_large_directory_is_looked_at_in_part(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path)
    for number in range(50):
        (tmp_path / f"{number}.txt").touch()
    assert "has no config.json" in refusal(tmp_path)
