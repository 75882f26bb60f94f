"""Recognition of directories and names that are no model in safetensors, with the remedy for each."""

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

IS_ADAPTER = "is an adapter, not a model: serve the model that it was trained for with --lora NAME=DIRECTORY"
_MOST_FILES = 10_000
_MOST_DEPTH = 4
_SHOWN = 3
_LONGEST = 200
_ADAPTER = "adapter_config.json"
_DATA = ".parquet", ".arrow", ".jsonl", ".csv", ".tsv", ".tfrecord", ".webdataset"
_DATASET = "dataset_info.json", "dataset_infos.json", "dataset_dict.json"
_PICKLED = ".bin", ".pt", ".pth", ".ckpt", ".pkl"
_UNFINISHED = ".incomplete", ".part", ".aria2", ".crdownload", ".download"
_CONVERT = "look for a version of the model in safetensors, or save it so with save_pretrained of transformers"
_OTHER_WEIGHTS = {
    _PICKLED: f"holds pickled weights only, which can run code when they are read: {_CONVERT}",
    (".onnx", ".onnx_data"): "holds ONNX weights only: serve the model that they were exported from",
    (".h5", ".msgpack", ".keras"): f"holds weights of TensorFlow or Flax only: {_CONVERT}",
    (".engine", ".plan"): "holds a TensorRT engine: serve the model that it was built from",
    (".tflite", ".litertlm", ".task", ".mlmodel", ".pte"): "holds a model for phones: serve the one it was made from",
}
"""Reasons by the suffixes of weights."""
_WEIGHTS = (".safetensors", ".gguf")


def model_fault(names: Collection[str], *, weights: bool = True) -> str:
    """Return why files of these names are no model that can be served, and what to do; empty if they may be one.

    `names` are relative to the directory and may include those of sub-directories. Without `weights`, none are needed.
    """
    tops = {name for name in names if "/" not in name}
    if "config.json" not in tops:
        return _without_config(names, tops)
    if not weights or any(name.endswith(_WEIGHTS) and name != "adapter_model.safetensors" for name in tops):
        return ""
    return weights_fault(names)


def hub_fault(names: Collection[str]) -> str:
    """Return why a hub's repository of these files cannot be served under its own name; empty if it may be a model."""
    files = sorted(name for name in names if name.endswith(".gguf") and not name.startswith("mmproj"))
    if files and not any(name.endswith(".safetensors") for name in names):
        return f"holds GGUF files: name one of them behind a colon, as in :{files[0]}"
    return model_fault(names)


def weights_fault(names: Collection[str]) -> str:
    """Return why files of these names have no weights that can be loaded, and what to do."""
    if _ADAPTER in names:
        return IS_ADAPTER
    if any(name.endswith(_UNFINISHED) for name in names):
        return "holds no weights yet: its download has not ended"
    if "model.safetensors.index.json" in names:
        return "lacks the weights that its model.safetensors.index.json names: download them"
    if fault := _other_weights(names):
        return fault
    return "holds neither model.safetensors nor model.safetensors.index.json: its weights were not downloaded"


def _without_config(names: Collection[str], tops: Collection[str]) -> str:
    if not names:
        return "is empty"
    if _ADAPTER in tops:
        return IS_ADAPTER
    if "model_index.json" in tops:
        return "is a pipeline of diffusers, which generates images or the like: Tercet serves language models"
    if "modules.json" in tops:
        return (
            "is a model of sentence-transformers whose transformer is not beside modules.json, which is not supported"
        )
    if folders := _folders(names, "config.json"):
        there = ", ".join(folders[:_SHOWN]) + ("" if len(folders) <= _SHOWN else f", {len(folders) - _SHOWN} more")
        where = "a sub-directory" if len(folders) == 1 else "sub-directories"
        return f"has no config.json, but {where} that may be the model, name that one: {there}"
    if folders := _folders(names, _ADAPTER):
        return f"has no config.json, and holds adapters, which are served beside a model: {', '.join(folders[:_SHOWN])}"
    if any(name.endswith(_UNFINISHED) for name in names):
        return "has no config.json yet: its download has not ended"
    if "params.json" in tops:
        return "holds a checkpoint in its maker's own format (params.json): take the one with a config.json"
    return _other_weights(names) or _other_contents(names, tops)


def _other_contents(names: Collection[str], tops: Collection[str]) -> str:
    if any(name in tops for name in _DATASET) or any(name.endswith(_DATA) for name in names):
        return "has no config.json, and looks like a dataset: name the directory of a model"
    if "app.py" in tops or "Dockerfile" in tops:
        return "has no config.json, and looks like a Space or a program: name the directory of a model"
    if "tokenizer.json" in tops or "tokenizer_config.json" in tops:
        return "holds a tokenizer and no model: it has no config.json"
    if any(name.endswith(".safetensors") for name in tops):
        return "holds weights without their config.json: download it from where they come from"
    return "has no config.json: a model is a directory with one, a tokenizer and weights in safetensors"


def _other_weights(names: Collection[str]) -> str:
    for suffixes, fault in _OTHER_WEIGHTS.items():
        if any(name.endswith(suffixes) for name in names):
            return fault
    return ""


def _folders(names: Collection[str], file: str) -> list[str]:
    """Return the sub-directories that have a file of this name and no other such directory above them."""
    found = sorted(str(PurePosixPath(name).parent) for name in names if PurePosixPath(name).name == file)
    return [each for each in found if not any(each.startswith(f"{other}/") for other in found)]


def config_fault(config: Mapping[str, Any]) -> str:
    """Return why the object in a config.json is not that of a model, and what to do; empty if it may be one."""
    if config.keys() & {"architectures", "model_type"}:
        return ""
    if "_class_name" in config and "_diffusers_version" in config:
        return "belongs to a pipeline of diffusers, which generates images or the like: Tercet serves language models"
    if any(name.startswith("pooling_mode") for name in config) or config.keys() >= {"in_features", "out_features"}:
        return "belongs to a module of a sentence-transformers model: name the directory above it"
    if isinstance(message := config.get("error"), str):
        return f"holds an error message instead of the file, {message[:_LONGEST]!r}: download it again"
    return ""


def file_names(directory: Path) -> list[str]:
    """Return the names of a directory's files and of those in its sub-directories, a bounded number.

    Hidden directories are left out, as are those that cannot be read.
    """
    return [str(path.relative_to(directory)) for path in _files(directory, _MOST_DEPTH, [_MOST_FILES])]


def _files(directory: Path, depth: int, left: list[int]) -> Iterator[Path]:
    """Yield files; `left` holds the number of entries that may still be looked at."""
    try:
        entries = sorted(directory.iterdir())
        for path in entries:
            left[0] -= 1
            if left[0] < 0:
                return
            if not path.is_dir():
                yield path
            elif depth > 1 and not path.name.startswith("."):
                yield from _files(path, depth - 1, left)
    except OSError:
        return


def file_as_model(path: Path) -> str:
    """Return why a file is no model, and what to do."""
    if path.suffix in (".zip", ".gz", ".tgz", ".tar", ".zst", ".xz", ".7z"):
        return "is an archive: unpack it and name the directory"
    if path.suffix in (".safetensors", ".json", ".model", ".jinja"):
        return f"is a file of a model: name its directory, {str(path.parent)!r}"
    return "is a file: a model is a directory with a config.json and safetensors, or a .gguf file"


def name_fault(name: str) -> str:
    """Return why a name is neither a directory nor a hub id, if it looks like something else; otherwise empty."""
    if match := re.match(r"https?://[^/]+/(datasets|spaces)/", name):
        return f"is the address of a {match[1].removesuffix('s')}, not of a model"
    if match := re.match(r"https?://[^/]+/([\w.-]+/[\w.-]+?)(\.git)?(/|$|\?|#)", name):
        return f"is an address: name the model by its Hugging Face id, which may be {match[1]!r}"
    if name.startswith("hf:"):
        return "names no GGUF file: add one, as in hf:OWNER/REPO:FILE.gguf, or leave out hf: for safetensors"
    if match := re.fullmatch(r"([\w.-]+(?:/[\w.-]+)?)[:@].+", name):
        return f"names a version, which is not supported: the Hugging Face id may be {match[1]!r}"
    return ""
