"""Factory of the encoders (`ports.Encoder`), by the name of their executor."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tercet.protocol.messages.values import Task
from tercet.protocol.system.process import gc_disabled_during_imports
from tercet.scheduler.config import ConfigError, ModelOptions
from tercet.scheduler.core.embedding.plan import EncoderCapacity
from tercet.scheduler.model_files import ModelError, read_json
from tercet.scheduler.ports import Advance, Encoder, MediaEncoder
from tercet.scheduler.resolved_model import ResolvedModel


@dataclass(frozen=True)
class ServedEncoder:
    """An encoder, and the names of its scores if it classifies."""

    encoder: Encoder
    labels: list[str]


Build = Callable[[ModelOptions, Task, Path, Callable[[int, int], None], Advance], ServedEncoder]
"""The fourth argument is called with (bytes loaded, bytes in total) while weights load."""


def build_torch(
    options: ModelOptions, task: Task, path: Path, report: Callable[[int, int], None], advance: Advance
) -> ServedEncoder:
    """Return an encoder that computes with torch."""
    with gc_disabled_during_imports():
        from tercet.scheduler.executor.encoder_worker import EncoderOptions, EncoderWorker

    if options.quantization != "none":
        raise ConfigError(f"--quantization {options.quantization} is for models that generate")
    if options.kv_cache_dtype != "auto":
        raise ConfigError(f"--kv-cache-dtype {options.kv_cache_dtype} is for models that generate")
    if options.split_flags:
        raise ConfigError(f"{options.split_flags} is for models that generate")
    worker = EncoderWorker(
        EncoderOptions(
            model=path,
            task=task,
            dtype=options.dtype,
            device=options.device,
            load_format="dummy" if options.load_format == "dummy" else "safetensors",
            context_length=options.context_length,
            threads=options.threads,
        ),
        report,
        advance,
    )
    return ServedEncoder(worker, worker.labels)


def build_fake(
    options: ModelOptions,
    task: Task,
    path: Path,
    report: Callable[[int, int], None],  # noqa: ARG001
    advance: Advance,  # noqa: ARG001
) -> ServedEncoder:
    """Return an encoder that computes nothing but has the vocabulary of a real model. It needs no torch."""
    from tercet.scheduler.testing.fake_encoder import FakeEncoder

    config = read_json(path / "config.json")
    length, vocab_size, width = (config.get(name) for name in ("max_position_embeddings", "vocab_size", "hidden_size"))
    if not (isinstance(length, int) and isinstance(vocab_size, int) and isinstance(width, int)):
        raise ModelError(f"{path}/config.json lacks max_position_embeddings, vocab_size or hidden_size")
    labels = [f"LABEL_{number}" for number in range(2)] if task is Task.CLASSIFY else []
    capacity = EncoderCapacity(
        context_length=options.context_length or length,
        vocab_size=vocab_size,
        token_types=2,
        width=len(labels) or width,
    )
    return ServedEncoder(FakeEncoder(capacity), labels)


def build_tower(options: ModelOptions, found: ResolvedModel, advance: Advance) -> MediaEncoder:
    """Return the tower of a model that takes images or sounds in prompts."""
    with gc_disabled_during_imports():
        from tercet.scheduler.executor.media.tower_worker import TowerWorker
        from tercet.scheduler.executor.worker_options import WorkerOptions

    worker = WorkerOptions(
        model=found.path,
        weights=found.weights,
        dtype=options.dtype,
        device=options.device,
        threads=options.threads,
    )
    return TowerWorker(worker, advance)


ENCODERS: dict[str, Build] = {"torch": build_torch, "fake": build_fake}
