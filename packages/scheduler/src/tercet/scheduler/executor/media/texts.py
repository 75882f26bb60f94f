"""Texts of a step that an encoder reads: keys and values of their encodings, and the pages of each row's."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from tercet.kernels.attention.api import AttentionBackend
from tercet.protocol.messages.encoder_input import EncoderInput
from tercet.protocol.messages.values import unpack_ints
from tercet.scheduler.core.places.loads import TextCapacity, TextLoad
from tercet.scheduler.core.plan import Plan, Row, SlotInit
from tercet.scheduler.device.device_memory import available_bytes
from tercet.scheduler.device.staging import Array, HostToDevice
from tercet.scheduler.executor.kv_pool import KVGroup, KVPool, KVShape
from tercet.scheduler.executor.media.audio import SHARE, StepCross, plan_cross
from tercet.scheduler.executor.media.unread import Unread
from tercet.scheduler.executor.sampling.slot_transcripts import Tokens
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.layers.decoder import CausalLM
from tercet.scheduler.models.layers.encoder_decoder.cross_attention import CrossAttention
from tercet.scheduler.models.layers.encoder_decoder.text_encoder import TextEncoder

logger = logging.getLogger(__name__)

_PLACES = 4
"""Places for each slot: those of texts that no choice uses any more are found again."""


class LoadedTexts(NamedTuple):
    """The encoder of a loaded model, and the decoder's layers that attend to its output."""

    encoder: TextEncoder
    longest: int
    """Maximum tokens that the encoder reads."""
    start: tuple[int, ...]
    """Tokens that the decoder starts from."""
    config: ModelConfig
    layers: Sequence[CrossAttention]

    @classmethod
    def of(cls, start: tuple[int, ...], model: CausalLM) -> "LoadedTexts":
        """Return the encoder of a model."""
        config, encoder = model.config, model.encoder
        if config.encoder is None or not isinstance(encoder, nn.Module):
            raise TypeError(f"{config.architecture} has no encoder of text")
        layers = [each for each in model.modules() if isinstance(each, CrossAttention)]
        return cls(encoder, config.encoder.context_length, start, config, layers)


class TextMemory(NamedTuple):
    """Keys and values of encoded texts, written once: pages of a pool of their own, kept when weights change."""

    pool: KVPool
    capacity: TextCapacity
    store: None = None
    """Requests have their texts with them, and no frames."""

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """Tensors of the pool."""
        return self.pool.tensors

    @classmethod
    def of(cls, loaded: LoadedTexts, options: WorkerOptions, device: torch.device) -> "TextMemory":
        """Allocate pages for a text of the largest length in each slot, as far as a share of free memory suffices.

        If it does not hold one such text, shorter ones are served. Raise ValueError if it does not hold a page.
        """
        config, size = loaded.config, options.page_size
        shape = KVShape(page_size=size, kv_heads=config.kv_heads, head_dim=config.head_dim, dtype=config.dtype)
        page_bytes = shape.page_bytes * len(loaded.layers)
        most = options.slots * -(-loaded.longest // size)
        pages = min(most, int(available_bytes(device) * SHARE) // page_bytes)
        if not pages:
            raise ValueError(f"a quarter of free memory does not hold a page of encoded text of {page_bytes} bytes")
        longest = min(loaded.longest, pages * size)
        if longest < loaded.longest:
            logger.warning("encoder's input lowered to fit memory: wanted=%d served=%d", loaded.longest, longest)
        layers = dict.fromkeys((layer.layer_id for layer in loaded.layers), shape)
        pool = KVPool([KVGroup(name="cross", layers=layers, pages=pages)], device)
        logger.info("encoded texts: tokens=%d memory=%.2f GiB", pages * size, pool.bytes / 2**30)
        form = EncoderInput(tokens=longest, start=[*loaded.start])
        places = min(pages, _PLACES * options.slots)
        return cls(pool, TextCapacity(form=form, places=places, pages=pages, page_size=size))


class StepTexts:
    """The pages of each slot's text. A slot without one, as in rehearsals, reads the first position of page 0."""

    def __init__(
        self,
        loaded: LoadedTexts,
        memory: TextMemory,
        backend: Callable[[], AttentionBackend],
        slots: int,
        device: torch.device,
    ) -> None:
        self._loaded, self._device = loaded, device
        self._pool, self._form = memory.pool, memory.capacity.form
        self._backend = backend()
        self._to_device = HostToDevice(device)
        self._loads: dict[int, TextLoad] = {}
        """Texts by place."""
        self._left: set[int] = set()
        """Places whose texts are not encoded yet."""
        self._places = np.full(slots, -1, dtype=np.int64)
        self._lengths = np.ones(slots, dtype=np.int64)
        width = -(-self._form.tokens // memory.capacity.page_size)
        self._pages = np.zeros((slots, width), dtype=np.int64)

    def load(self, plan: Plan) -> None:
        """Note the texts that get places."""
        self._loads.update({load.place: load for load in plan.texts})
        self._left.update(load.place for load in plan.texts)

    def unread(self, slot: int) -> Unread | None:
        """Return the text of a slot that has one, if it is not encoded."""
        place = int(self._places[slot])
        if place not in self._left:
            return None
        load = self._loads[place]
        return Unread(0, (place, load.ids), True, partial(self._encode, load))

    def encode_blank(self) -> None:
        """Encode a text of the largest length, for the memory that this takes. Its keys and values are not kept."""
        hidden = self._loaded.encoder(torch.zeros(self._form.tokens, dtype=torch.int64, device=self._device))
        for layer in self._loaded.layers:
            layer.keys_values(hidden)

    def introduce(self, inits: Sequence[SlotInit]) -> None:
        """Note the texts of choices that take slots."""
        for init in inits:
            self._places[init.slot], self._lengths[init.slot] = init.text, 1
            if init.text >= 0:
                load = self._loads[init.text]
                self._lengths[init.slot] = len(unpack_ints(load.ids))
                self._pages[init.slot, : len(load.pages)] = load.pages

    def begin(self, rows: Sequence[Row]) -> StepCross:
        """Return the cross-attention of a step. Each token is a row: it sees its whole text."""
        slots = np.repeat([row.slot for row in rows], [row.count for row in rows])
        lengths = self._lengths[slots]
        width = -(-int(lengths.max()) // self._pool.page_size)
        plan_cross(self._backend, self._to_device, self._pool.page_size, lengths, self._pages[slots, :width])
        return StepCross(self._pool, self._backend)

    def restrict(self, logits: torch.Tensor, slots: Array, positions: Array, known: Tokens) -> None:
        """Leave the logits as they are: any token may follow."""

    def _encode(self, load: TextLoad) -> None:
        ids = torch.tensor(unpack_ints(load.ids), device=self._device)
        hidden, size = self._loaded.encoder(ids), self._pool.page_size
        pages = torch.tensor(load.pages, device=self._device)
        slots = (pages[:, None] * size + torch.arange(size, device=self._device)).flatten()[: len(ids)]
        for layer in self._loaded.layers:
            self._pool.store(layer.layer_id, *layer.keys_values(hidden), slots)
        self._left.discard(load.place)
