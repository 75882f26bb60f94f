"""The model that a process is told to serve: where it is, and by what it is known."""

from dataclasses import dataclass
from pathlib import Path

from tercet.protocol.messages.values import ModelIdentity, Task
from tercet.scheduler.config import ModelOptions
from tercet.scheduler.model_files import (
    SLOW_ON_CPU,
    ModelError,
    check_tokenizer,
    model_identity,
    reading,
    resolve_model,
    served_dtype,
    tokenizer_files,
)
from tercet.scheduler.model_task import task_of


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """The model that is served."""

    path: Path
    """Its directory."""
    name: str
    """What clients call it."""
    task: Task
    weights: Path | None = None
    """The directory of its weights, if it is another."""


def resolve_served_model(options: ModelOptions, weights: str = "") -> ResolvedModel:
    """The model that options name, downloaded if need be, which may take long. Raises ModelError."""
    with reading(options.model):
        path = resolve_model(options.model)
        name = path.name if Path(options.model).is_dir() else options.model
        found = ResolvedModel(path, name, task_of(path, options.task), Path(weights).absolute() if weights else None)
        if found.weights is not None and found.task is not Task.GENERATE:
            raise ModelError(f"{name} generates no text, and has its own weights alone")
        check_tokenizer(path)
        tokenizer_files(path)  # they are asked for in a thread that nothing may end
        return found


def on_gpu(options: ModelOptions) -> bool:
    """Whether a model runs on a GPU, which wants more at once than a CPU.

    Raises ConfigError for a GPU that cannot be used, InsufficientMemoryError for one that cannot be used now.
    """
    if options.executor != "torch" or options.device == "cpu":
        return False
    from tercet.scheduler.device.devices import first_gpu

    return first_gpu(options.device) is not None


def identity_of(options: ModelOptions, found: ResolvedModel) -> ModelIdentity:
    """By which a model is known: where it is computed decides with the options in which dtype that is.

    Raises ModelError.
    """
    slow, encoder = _slow_dtype(options), found.task is not Task.GENERATE
    with reading(str(found.path)):
        dtype = served_dtype(found.path, options.dtype, slow=slow, encoder=encoder)
        return model_identity(
            found.path, dtype, options.quantization, options.kv_cache_dtype, options.context_length, found.weights
        )


def _slow_dtype(options: ModelOptions) -> str:
    """That of the device that `options` name. Needs no torch where nothing is computed."""
    if not on_gpu(options):
        return SLOW_ON_CPU
    from tercet.scheduler.device.devices import device_of, slow_dtype

    return slow_dtype(device_of(options.device))
