"""Resolution of the model that the options name: its directory, task and identity."""

from dataclasses import dataclass
from pathlib import Path

from tercet.protocol.messages.values import ModelIdentity, Task
from tercet.scheduler.config import ModelOptions
from tercet.scheduler.gguf_models import resolve_any_model, served_name
from tercet.scheduler.model_files import (
    SLOW_ON_CPU,
    ModelError,
    check_model,
    check_tokenizer,
    model_identity,
    reading,
    served_dtype,
    tokenizer_files,
)
from tercet.scheduler.model_task import task_of


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """The served model."""

    path: Path
    """Directory of the model."""
    name: str
    """Name of the model in requests."""
    task: Task
    weights: Path | None = None
    """Directory of the weights, if it differs from `path`."""


def resolve_served_model(options: ModelOptions, weights: str = "") -> ResolvedModel:
    """Resolve the model that the options name. Downloads it if needed, which may take long. Raises ModelError."""
    with reading(options.model):
        path = resolve_any_model(options.model)
        check_model(path, weights=_needs_weights(options) and not weights)
        name = served_name(options.model, path)
        found = ResolvedModel(path, name, task_of(path, options.task), Path(weights).absolute() if weights else None)
        if found.weights is not None and found.task is not Task.GENERATE:
            raise ModelError(f"{name} generates no text, and has its own weights alone")
        check_tokenizer(path)
        tokenizer_files(path)  # later they are read in a thread whose errors end nothing
        return found


def _needs_weights(options: ModelOptions) -> bool:
    return options.executor != "fake" and options.load_format != "dummy"


def on_gpu(options: ModelOptions) -> bool:
    """Return whether the model runs on a GPU.

    Raises ConfigError for a GPU that cannot be used, InsufficientMemoryError for one that cannot be used now.
    """
    if options.executor != "torch" or options.device == "cpu":
        return False
    from tercet.scheduler.device.devices import first_gpu

    return first_gpu(options.device) is not None


def identity_of(options: ModelOptions, found: ResolvedModel) -> ModelIdentity:
    """Return the identity of a model. Its dtype depends on the options and on the device. Raises ModelError."""
    slow, encoder = _slow_dtype(options), found.task is not Task.GENERATE
    with reading(str(found.path)):
        dtype = served_dtype(found.path, options.dtype, slow=slow, encoder=encoder)
        return model_identity(
            found.path, dtype, options.quantization, options.kv_cache_dtype, options.context_length, found.weights
        )


def _slow_dtype(options: ModelOptions) -> str:
    """Return the slow dtype of the device in `options`. Needs no torch if no device computes."""
    if not on_gpu(options):
        return SLOW_ON_CPU
    from tercet.scheduler.device.devices import device_of, slow_dtype

    return slow_dtype(device_of(options.device))
