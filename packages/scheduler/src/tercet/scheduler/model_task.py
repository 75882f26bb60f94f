"""Task of a model, from its config.json and from the files that sentence-transformers puts beside it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tercet.protocol.messages.values import Task
from tercet.scheduler.architectures import is_encoder, split_architecture
from tercet.scheduler.model_files import ModelError, json_value, read_file, read_json
from tercet.scheduler.sentence_fields import (
    NORMALIZE,
    POOLING,
    check_classifier,
    kind_of,
    longest_text,
    shortened_to,
)

Pooling = Literal["cls", "mean", "max", "last"]
_POOLING: dict[str, Pooling] = {
    "cls": "cls",
    "cls_token": "cls",
    "mean": "mean",
    "mean_tokens": "mean",
    "max": "max",
    "max_tokens": "max",
    "lasttoken": "last",
}
"""Pooling modes by sentence-transformers' names."""
_UNLIMITED = 2**31 - 1
_MODULES = {Task.EMBED: ("Transformer", "Pooling", "Normalize"), Task.CLASSIFY: ("Transformer",)}
"""Modules that a model may have, in this order."""


@dataclass(frozen=True, slots=True)
class Sentences:
    """Settings of how token vectors become the vector of an input."""

    pooling: Pooling
    normalize: bool
    max_length: int = _UNLIMITED
    dimensions: int | None = None
    """Length to which a vector is truncated after everything else; None keeps all."""


def task_of(directory: Path, wanted: str = "auto") -> Task:
    """Return the task that a model is served for. Raises ModelError if the model cannot do the `wanted` one."""
    config = read_json(directory / "config.json")
    names = config.get("architectures")
    family, kind = split_architecture(str(names[0]) if isinstance(names, list) and names else "")
    if kind == "ForSequenceClassification":
        able = [Task.CLASSIFY]
    elif is_encoder(family) or (family and kind == "Model"):
        able = [Task.EMBED]
    else:
        able = [Task.GENERATE, Task.EMBED] if family else [Task.GENERATE]
    if wanted == "auto":
        return able[-1] if (directory / "modules.json").is_file() else able[0]
    if wanted not in able:
        raise ModelError(f"{directory} cannot {wanted}: a {family}{kind} is there to {' or '.join(able)}")
    return Task(wanted)


def read_sentences(directory: Path, *, causal: bool, task: Task = Task.EMBED) -> Sentences:
    """Return the settings of sentence-transformers' files, or its defaults if there are none. Raises ModelError.

    A causal model without such files gives the last token's vector, normalized. A classifier has no module after its
    transformer.
    """
    if task is Task.CLASSIFY:
        check_classifier(read_json(directory / "config.json"))
    path = directory / "modules.json"
    if not path.is_file():
        if task is Task.CLASSIFY:
            shortened_to(directory, task)
        return Sentences("last", True) if causal else Sentences("mean", False)
    folders = _folders(path, task)
    if "Pooling" not in folders and task is Task.EMBED:
        raise ModelError(f"{path} names no Pooling")
    if folder := folders.get("Normalize"):
        config = directory / folder / "config.json"
        NORMALIZE.check(read_json(config) if config.is_file() else {}, f"{config}: ", unknown=False)
    return Sentences(
        pooling=_pooling(directory / folders["Pooling"] / "config.json") if "Pooling" in folders else "mean",
        normalize="Normalize" in folders,
        max_length=longest_text(directory, task) or _UNLIMITED,
        dimensions=shortened_to(directory, task),
    )


def _folders(path: Path, task: Task) -> dict[str, str]:
    """Return the folder of each module of a modules.json, by its kind. Raises ModelError for other kinds or orders."""
    order = _MODULES[task]
    folders: dict[str, str] = {}
    kinds: list[str] = []
    for module in _modules(path):
        kind, folder = kind_of(module, str(path)), str(module.get("path") or "")
        if kind not in order:
            raise ModelError(f"{path}: modules of type {kind!r} are not supported of a model to {task.value}")
        if folder and Path(folder).name != folder:
            raise ModelError(f"{path}: {folder!r} is no folder of the model")
        if kind == "Transformer" and folder:
            raise ModelError(f"{path}: the transformer must lie in the model's own folder, not in {folder!r}")
        folders[kind] = folder
        kinds.append(kind)
    if kinds != [*order[: len(kinds)]]:
        raise ModelError(f"{path}: the modules are {', '.join(kinds)}, not {', '.join(order)} in that order")
    return folders


def _modules(path: Path) -> list[dict[str, Any]]:
    modules = json_value(read_file(path), str(path))
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelError(f"{path} holds no list of modules")
    return modules


def _pooling(path: Path) -> Pooling:
    """Return the pooling mode in a Pooling module's config.json; the default is the mean."""
    config = read_json(path)
    POOLING.check(config, f"{path}: ", unknown=False)
    modes = [name.removeprefix("pooling_mode_") for name, on in config.items() if "pooling_mode_" in name and on]
    if (given := config.get("pooling_mode")) is not None:
        modes = [str(mode) for mode in given] if isinstance(given, list) else [str(given)]
    modes = modes or ["mean"]
    if len(modes) != 1 or modes[0] not in _POOLING:
        raise ModelError(f"{path}: pooling by {' and '.join(modes)} is not supported")
    if config.get("include_prompt") not in (None, True):
        raise ModelError(f"{path}: include_prompt: pooling without the prompt's tokens is not supported")
    return _POOLING[modes[0]]
