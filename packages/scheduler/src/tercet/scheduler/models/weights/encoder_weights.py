"""The loader of encoders, whose checkpoints may have name prefixes and unused heads."""

from collections.abc import Set
from pathlib import Path

from torch import nn

from tercet.scheduler.model_files import ModelError, read_header, weight_files
from tercet.scheduler.models.weights.weights import LoadProgress, Progress, check_fit, checkpoint_tensors, fill, finish

_PREFIXES = ("", "model.", "bert.", "roberta.")
"""Name prefixes of the base model in checkpoints of models with a head."""
_UNUSED = ("cls.", "lm_head.", "pooler.", "head.", "decoder.", "classifier.", "qa_outputs.", "score.")
"""Heads, which a model for another task ignores."""
_COMPUTED = ("position_ids", ".inv_freq")
_OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def load_encoder_weights(model: nn.Module, directory: Path, progress: Progress | None = None) -> None:
    """Fill an encoder from a checkpoint, casting to the model's dtype.

    Raise ModelError, before the first byte is copied, that lists each missing, unexpected or misshapen tensor. Raise it
    also for a quantized decoder, because encoders have no quantized layers.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ModelError(f"{directory}: quantised checkpoints are served only of models that generate")
    files = {path: read_header(path) for path in weight_files(directory)}
    targets = checkpoint_tensors(model, {name: tensor for header in files.values() for name, tensor in header.items()})
    names = {name: _target(name, targets.keys()) for header in files.values() for name in header}
    fitting = {
        path: {target: tensor for name, tensor in header.items() if (target := names[name])}
        for path, header in files.items()
    }
    check_fit(directory, {name: place.stored_shape for name, place in targets.items()}, fitting)
    fill(files, {name: targets[target] for name, target in names.items() if target}, LoadProgress(progress, files))
    finish(model)


def _target(name: str, targets: Set[str]) -> str:
    """Return the name here of a stored tensor; empty for an unused one."""
    for old, new in _OLD_NAMES.items():
        name = name.replace(old, new)
    for prefix in _PREFIXES:
        if name.startswith(prefix) and name.removeprefix(prefix) in targets:
            return name.removeprefix(prefix)
    bare = name
    for prefix in _PREFIXES:
        bare = bare.removeprefix(prefix)
    return "" if bare.startswith(_UNUSED) or bare.endswith(_COMPUTED) else name
