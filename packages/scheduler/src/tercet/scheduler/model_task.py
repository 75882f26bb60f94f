"""What a model is for, told by its config.json and by the files that sentence-transformers puts beside it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tercet.protocol.values import Task
from tercet.scheduler.model_files import ModelError, read_json

ENCODERS = {
    "Bert": "bert",
    "Roberta": "roberta",
    "XLMRoberta": "roberta",
    "Camembert": "roberta",
    "ModernBert": "modernbert",
}
"""Bidirectional families, by how their architectures begin, and the one each of them is."""
DECODERS = (
    "Ernie4_5",
    "Glm",
    "Granite",
    "Llama",
    "Mistral",
    "Mixtral",
    "Olmoe",
    "Phi3",
    "Qwen2",
    "Qwen2Moe",
    "Qwen3",
    "Qwen3Moe",
    "SeedOss",
    "SmolLM3",
)
"""Causal families that can embed and classify, too."""

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
"""As sentence-transformers spells them."""
_UNLIMITED = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Sentences:
    """How the vectors of tokens become the vector of an input."""

    pooling: Pooling
    normalize: bool
    max_length: int = _UNLIMITED


def family_of(architecture: str) -> tuple[str, str]:
    """("Bert", "ForSequenceClassification") of BertForSequenceClassification; no family for one not known here."""
    for family in (*ENCODERS, *DECODERS):
        kind = architecture.removeprefix(family)
        if kind != architecture and kind.startswith(("For", "Model")):  # Llama4ForCausalLM is no Llama
            return family, kind
    return "", architecture


def task_of(directory: Path, wanted: str = "auto") -> Task:
    """What the model in a directory is served for. Raises ModelError where it cannot do what is `wanted`."""
    config = read_json(directory / "config.json")
    names = config.get("architectures")
    family, kind = family_of(str(names[0]) if isinstance(names, list) and names else "")
    if kind == "ForSequenceClassification":
        able = [Task.CLASSIFY]
    elif family in ENCODERS or (family and kind == "Model"):
        able = [Task.EMBED]
    else:
        able = [Task.GENERATE, Task.EMBED] if family else [Task.GENERATE]
    if wanted == "auto":
        return able[-1] if (directory / "modules.json").is_file() else able[0]
    if wanted not in able:
        raise ModelError(f"{directory} cannot {wanted}: a {family}{kind} is there to {' or '.join(able)}")
    return Task(wanted)


def read_sentences(directory: Path, *, causal: bool) -> Sentences:
    """What sentence-transformers' files say, or its defaults for a model without them. Raises ModelError.

    A causal model without such files gives the last token's vector, normalised.
    """
    path = directory / "modules.json"
    if not path.is_file():
        return Sentences("last", True) if causal else Sentences("mean", False)
    pooling: Pooling | None = None
    normalize = False
    for module in _modules(path):
        kind, folder = str(module.get("type")).rpartition(".")[2], str(module.get("path", ""))
        if folder and Path(folder).name != folder:
            raise ModelError(f"{path}: {folder!r} is no folder of the model")
        match kind:
            case "Transformer":
                if folder:
                    raise ModelError(f"{path}: the transformer must lie in the model's own folder, not in {folder!r}")
            case "Pooling":
                pooling = _pooling(directory / folder / "config.json")
            case "Normalize":
                normalize = True
            case _:
                raise ModelError(f"{path}: modules of type {kind!r} are not supported")
    if pooling is None:
        raise ModelError(f"{path} names no Pooling")
    return Sentences(pooling, normalize, _max_length(directory))


def _modules(path: Path) -> list[dict[str, Any]]:
    try:
        modules = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelError(f"{path} holds no list of modules")
    return modules


def _pooling(path: Path) -> Pooling:
    """The one way of pooling that a Pooling module's config.json asks for."""
    config = read_json(path)
    modes = [name.removeprefix("pooling_mode_") for name, on in config.items() if "pooling_mode_" in name and on]
    if "pooling_mode" in config:
        modes = [str(config["pooling_mode"])]
    if len(modes) != 1 or modes[0] not in _POOLING:
        raise ModelError(f"{path}: pooling by {' and '.join(modes) or 'nothing'} is not supported")
    if config.get("include_prompt") is False:
        raise ModelError(f"{path}: pooling without the prompt's tokens is not supported")
    return _POOLING[modes[0]]


def _max_length(directory: Path) -> int:
    path = directory / "sentence_bert_config.json"
    length = read_json(path).get("max_seq_length") if path.is_file() else None
    return length if isinstance(length, int) and length > 0 else _UNLIMITED
