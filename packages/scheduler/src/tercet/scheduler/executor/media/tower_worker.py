"""The executor of a scheduler that only encodes: the tower of a model, without its language model."""

import logging
from collections.abc import Callable

import torch

from tercet.kernels.native.library import load_library, missing_library
from tercet.protocol.messages.embedding_form import EmbeddingForm
from tercet.protocol.messages.media import ImageInput
from tercet.scheduler.core.embedding.media_inputs import EncodeMediaPlan, EncodeMediaResult
from tercet.scheduler.device.cpu_threads import limit_torch_threads
from tercet.scheduler.device.devices import select_device
from tercet.scheduler.device.oom import SuppressOom, again, release_cached, require_memory
from tercet.scheduler.executor.loading import load_images, reading_model, shape_of
from tercet.scheduler.executor.media.embeddings import embedding_form
from tercet.scheduler.executor.media.images import LoadedImages, image_array
from tercet.scheduler.executor.media.sounds import LoadedSounds, samples_array
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.layers.shard import WHOLE
from tercet.scheduler.ports import Advance

logger = logging.getLogger(__name__)

MOST_FRAME_BYTES = 256 * 1024 * 1024
"""Size of the largest frame of a message."""


class EncodedStep:
    """A step that is already finished."""

    def __init__(self, value: EncodeMediaResult) -> None:
        self._value = value

    def result(self) -> EncodeMediaResult:
        """Return the result."""
        return self._value


class TowerWorker:
    """The `MediaEncoder` port."""

    def __init__(self, options: WorkerOptions, advance: Advance = lambda: None) -> None:
        """Load the tower. Raise ValueError for a model without one."""
        device = select_device(options.device)
        native = device.type == "cpu" and not missing_library()
        limit_torch_threads(options.threads)
        if options.threads is not None and native:
            load_library().set_threads(options.threads)
        config = shape_of(options, device)
        with require_memory("the weights of the tower"), reading_model(options.checkpoint):
            loaded = load_images(options, config, device, native=native, shard=WHOLE, advance=advance)
        if not isinstance(loaded, LoadedImages | LoadedSounds) or not isinstance(config, ModelConfig):
            raise ValueError("encoder_only: the model has no tower of images or sounds in prompts")
        if device.type == "cuda":
            with require_memory("the largest image or sound"):
                loaded.encode_blank()
        self.form: EmbeddingForm = embedding_form(loaded.model, config, options.model, options.weights)
        self._tower: Callable[..., torch.Tensor] | None = loaded.tower
        self._dtype = config.dtype

    def submit(self, plan: EncodeMediaPlan) -> EncodedStep:
        """Encode an image or a sound."""
        return EncodedStep(self._encode(plan))

    def close(self) -> None:
        """Do nothing: no thread or process belongs to the worker."""

    @torch.inference_mode()
    def _encode(self, plan: EncodeMediaPlan) -> EncodeMediaResult:
        with SuppressOom():
            embeddings = again(lambda: self._embeddings(plan), release_cached)
            if embeddings.nbytes > MOST_FRAME_BYTES:
                return EncodeMediaResult(step=plan.step, failure="the embeddings are larger than a message may be")
            if not torch.isfinite(embeddings).all():
                return EncodeMediaResult(step=plan.step, failure="the model gave no finite numbers")
            return EncodeMediaResult(step=plan.step, embeddings=embeddings.view(torch.uint8).numpy().tobytes())
        release_cached()
        logger.warning("encoder: image or sound failed, out of memory: bytes=%d", plan.array.nbytes)
        return EncodeMediaResult(step=plan.step, failure="there is not the memory here to encode so much at once")

    def _embeddings(self, plan: EncodeMediaPlan) -> torch.Tensor:
        """Return embeddings [embeddings, width] in memory of the host."""
        assert self._tower is not None
        if isinstance(plan.media, ImageInput):
            encoded = self._tower(image_array(plan.array, plan.media), *plan.media.original)
        else:
            encoded = self._tower(samples_array(plan.array))
        return encoded.to("cpu", self._dtype).contiguous()
