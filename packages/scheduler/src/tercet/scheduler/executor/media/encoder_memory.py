"""Memory of encoded audio or text, for the cross-attention of a decoder."""

from collections.abc import Callable

import torch

from tercet.kernels.attention.api import AttentionBackend
from tercet.scheduler.executor.media.audio import AudioMemory, LoadedAudio, StepAudio
from tercet.scheduler.executor.media.texts import LoadedTexts, StepTexts, TextMemory
from tercet.scheduler.executor.worker_options import WorkerOptions


def encoder_memory(
    loaded: LoadedAudio | LoadedTexts | None, options: WorkerOptions, config: object, device: torch.device
) -> AudioMemory | TextMemory | None:
    """Allocate the memory; None for a model without an encoder."""
    if isinstance(loaded, LoadedTexts):
        return TextMemory.of(loaded, options, device)
    return AudioMemory.of(loaded, options, config, device)


def step_encoder(
    loaded: LoadedAudio | LoadedTexts | None,
    memory: AudioMemory | TextMemory | None,
    backend: Callable[[], AttentionBackend],
    slots: int,
    device: torch.device,
) -> StepAudio | StepTexts | None:
    """Return the audio clips or texts of a model's steps; None for a model without an encoder."""
    if isinstance(loaded, LoadedTexts) and isinstance(memory, TextMemory):
        return StepTexts(loaded, memory, backend, slots, device)
    if isinstance(loaded, LoadedAudio) and isinstance(memory, AudioMemory):
        return StepAudio(loaded, memory, backend, slots, device)
    return None
