"""Limits of a worker that follow from its options and its model, and its log of them."""

import logging
from collections.abc import Sequence

from tercet.scheduler.core.plan import CacheGroup, Capacity
from tercet.scheduler.executor.kv_pool import KVPool
from tercet.scheduler.executor.media.audio import AudioMemory
from tercet.scheduler.executor.media.prompt_media import LoadedMedia
from tercet.scheduler.executor.media.texts import TextMemory
from tercet.scheduler.executor.sampling.slot_grammars import SlotGrammars
from tercet.scheduler.executor.state_pool import StatePool
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.model_files import tokenizer_files
from tercet.scheduler.models.audio.sound_model import SoundModel
from tercet.scheduler.models.config.model_config import DecoderShape
from tercet.scheduler.models.vision.image_model import ImageModel
from tercet.scheduler.tokenizer_files import tokenizer_end_ids

logger = logging.getLogger(__name__)


def capacity_of(
    options: WorkerOptions,
    config: DecoderShape,
    ends: Sequence[int],
    pool: KVPool,
    states: StatePool | None,
    grammars: SlotGrammars | None,
    images: LoadedMedia | None,
    encoded: AudioMemory | TextMemory | None,
) -> Capacity:
    """Return the limits that the core must know."""
    return Capacity(
        page_size=options.page_size,
        groups=[CacheGroup(group.name, group.pages, group.window) for group in pool.groups],
        slots=options.own_slots,
        snapshots=None if states is None else states.snapshots,
        context_length=config.context_length,
        vocab_size=config.vocab_size,
        eos_token_ids=list(ends),
        grammars=grammars.name if grammars else "",
        adapters=options.max_loras,
        images=images.model.form if images is not None and isinstance(images.model, ImageModel) else None,
        sounds=images.model.form if images is not None and isinstance(images.model, SoundModel) else None,
        video=images.model.video if images is not None and isinstance(images.model, ImageModel) else None,
        whole_images=images is not None and images.model.whole,
        audio=encoded.capacity if isinstance(encoded, AudioMemory) else None,
        texts=encoded.capacity if isinstance(encoded, TextMemory) else None,
    )


def end_ids(options: WorkerOptions, config: DecoderShape) -> list[int]:
    """Return the ids that end a text: those of the model's configuration, and the tokenizer's own end token."""
    ends = [*config.eos_token_ids, *tokenizer_end_ids(tokenizer_files(options.model))]
    return [*dict.fromkeys(token for token in ends if token < config.vocab_size)]


def served_context_length(options: WorkerOptions, config: DecoderShape) -> int:
    wanted = options.context_length or config.context_length
    if wanted > config.context_length:
        raise ValueError(f"context_length {wanted} is beyond the model's {config.context_length}")
    return wanted


def log_cache(pool: KVPool, states: StatePool | None, options: WorkerOptions) -> None:
    """Log the sizes of the KV cache and of the recurrent states."""
    tokens = [group.pages * options.page_size for group in pool.groups]
    logger.info("KV cache: %d tokens, %.2f GiB", tokens[0], pool.bytes / 2**30)
    for group, held in zip(pool.groups[1:], tokens[1:], strict=True):
        logger.info("KV cache of layers with a window: window=%d tokens=%d", group.window, held)
    if states is not None:
        gibibytes = states.bytes / 2**30
        logger.info(
            "recurrent states: slots=%d snapshots=%d memory=%.2f GiB", options.own_slots, states.snapshots, gibibytes
        )
