"""Audio of a step: samples that frontends sent, keys and values of their encodings, and the place of each row's."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from tercet.kernels.attention.api import AttentionBackend, AttentionBatch, AttentionParams
from tercet.protocol.messages.audio import AudioFormat, AudioInput
from tercet.protocol.messages.codec import Frame
from tercet.scheduler.core.places.loads import AudioCapacity
from tercet.scheduler.core.plan import Plan, Row, SlotInit
from tercet.scheduler.device.device_memory import available_bytes
from tercet.scheduler.device.staging import Array, HostToDevice
from tercet.scheduler.executor.kv_pool import KVGroup, KVPool, KVShape
from tercet.scheduler.executor.media.frame_store import FrameStore
from tercet.scheduler.executor.media.token_times import TokenTimes
from tercet.scheduler.executor.media.unread import Unread
from tercet.scheduler.executor.sampling.slot_transcripts import SlotTranscripts, Tokens
from tercet.scheduler.executor.step_output import PromptLogprobs, no_logprobs
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.models.audio.audio_model import AudioEncoder, AudioModel
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.layers.decoder import CausalLM
from tercet.scheduler.models.layers.encoder_decoder.cross_attention import CrossAttention

logger = logging.getLogger(__name__)

MOST_SAMPLE_BYTES = 1 << 30
"""Samples of all held requests; further requests are refused."""
SHARE = 0.25
"""Share of free memory for keys and values of encoded audio clips."""
_SAMPLE_BYTES = 2
Integers = np.ndarray[Any, np.dtype[np.int64]]


class LoadedAudio(NamedTuple):
    """Audio of a loaded model, the encoder, and the decoder's layers that attend to its output."""

    model: AudioModel
    encoder: AudioEncoder
    layers: Sequence[CrossAttention]

    @classmethod
    def of(cls, model: AudioModel, encoder: AudioEncoder, decoder: CausalLM) -> "LoadedAudio":
        """Return the audio of a decoder."""
        return cls(model, encoder, [each for each in decoder.modules() if isinstance(each, CrossAttention)])


class AudioStore(FrameStore):
    """Samples of the audio clips of requests."""

    def __init__(self, form: AudioFormat, most_bytes: int = MOST_SAMPLE_BYTES) -> None:
        super().__init__("audio clips", most_bytes)
        self._longest = form.samples * _SAMPLE_BYTES

    def add(self, audio: AudioInput, frames: Sequence[Frame]) -> str:
        """Keep the samples of a request. Return a fault, or an empty text."""
        size = memoryview(frames[0]).nbytes if len(frames) == 1 else 0
        if not 0 < size <= self._longest or size % _SAMPLE_BYTES:
            return "the samples do not fit the model"
        return self.keep({audio.sha256: frames[0]})

    def samples(self, sha256: bytes) -> np.ndarray[tuple[int], np.dtype[np.int16]]:
        """Return samples. Raise KeyError if they were never added or are dropped."""
        return np.frombuffer(self.frame(sha256), np.dtype("<i2")).astype(np.int16)


class CrossCache:
    """Keys and values of encoded audio clips, written once: each place is a run of pages of a pool of its own."""

    def __init__(
        self, options: WorkerOptions, config: ModelConfig, positions: int, layers: Sequence[int], device: torch.device
    ) -> None:
        """Allocate a place for each slot, as far as a share of free memory suffices. Raise ValueError for none."""
        page_size = options.page_size
        shape = KVShape(page_size=page_size, kv_heads=config.heads, head_dim=config.head_dim, dtype=config.dtype)
        self.positions = positions
        self._pages = -(-positions // page_size)
        place_bytes = self._pages * shape.page_bytes * len(layers)
        self.places = min(options.slots, int(available_bytes(device) * SHARE) // place_bytes)
        if not self.places:
            raise ValueError(f"a quarter of free memory does not hold an encoded clip of {place_bytes} bytes")
        group = KVGroup(name="cross", layers=dict.fromkeys(layers, shape), pages=self.places * self._pages)
        self.pool = KVPool([group], device)
        self._to_device = HostToDevice(device)

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return self.pool.bytes

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """Tensors of the cache."""
        return self.pool.tensors

    def store(self, place: int, layer: CrossAttention, hidden: torch.Tensor) -> None:
        """Write a layer's keys and values of the encoder's output [positions, hidden]."""
        first = place * self._pages * self.pool.page_size
        slots = torch.arange(first, first + self.positions, device=hidden.device)
        self.pool.store(layer.layer_id, *layer.keys_values(hidden), slots)

    def keys(self, place: int, layer_id: int) -> torch.Tensor:
        """Return a layer's keys [positions, heads, head_dim] of a place."""
        keys, _ = self.pool.layer(layer_id)
        return keys[place * self._pages : (place + 1) * self._pages].flatten(0, 1)[: self.positions]

    def plan(self, backend: AttentionBackend, places: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        """Prepare a step whose tokens have audio in these places. Each token is a row: it sees its whole clip."""
        table = places[:, None] * self._pages + np.arange(self._pages)
        plan_cross(backend, self._to_device, self.pool.page_size, np.full(len(places), self.positions), table)


def plan_cross(
    backend: AttentionBackend, to_device: HostToDevice, page_size: int, lengths: Integers, table: Integers
) -> None:
    """Prepare a step whose tokens each see some positions `lengths` [tokens] of pages `table` [tokens, pages]."""
    tokens = len(lengths)
    arrays = np.arange(tokens + 1), lengths, table
    query_start, kv_lens, page_table = to_device.send([each.astype(np.int32) for each in arrays])
    backend.plan(
        AttentionBatch(
            query_start=query_start,
            kv_lens=kv_lens,
            page_table=page_table,
            slot_mapping=torch.zeros(tokens, dtype=torch.int64, device=page_table.device),  # nothing is stored
            page_size=page_size,
            host_query_lens=[1] * tokens,
            host_kv_lens=lengths.tolist(),
        )
    )


class StepCross(NamedTuple):
    """Cross-attention of a step, for which the backend is planned."""

    pool: KVPool
    backend: AttentionBackend
    times: TokenTimes | None = None
    """Those of a step that computes text whose times are wanted."""

    def attend(self, layer_id: int, q: torch.Tensor, params: AttentionParams) -> torch.Tensor:
        """Attend with q [tokens, heads, head_dim]."""
        if self.times is not None:
            self.times.record(layer_id, q * params.scale)
        return self.backend.attend(q, *self.pool.layer(layer_id), params)


class StepAudio:
    """The place of each slot's audio. A slot without one, as in rehearsals, reads place 0."""

    def __init__(
        self,
        loaded: LoadedAudio,
        memory: "AudioMemory",
        backend: Callable[[], AttentionBackend],
        slots: int,
        device: torch.device,
    ) -> None:
        model = loaded.model
        self._loaded = loaded
        self._store, self._cache = memory.store, memory.cache
        self._backend = backend()
        self._places = np.zeros(slots, dtype=np.int64)
        self._left: dict[int, bytes] = {}
        """Hashes of audio clips that are not encoded yet, by place."""
        self._samples = np.zeros(memory.cache.places, dtype=np.int64)
        """Samples of the audio clip in each place."""
        self._transcripts = SlotTranscripts(model.rules, model.form.tokens, slots, device)
        self._times = None if model.alignment is None else TokenTimes(model.alignment, model.form)

    def load(self, plan: Plan) -> None:
        """Note the audio clips that get places, where they are not encoded yet."""
        self._left.update({load.place: load.sha256 for load in plan.audio})

    def unread(self, slot: int) -> Unread | None:
        """Return the audio clip of a slot that has one, if it is not encoded."""
        place = int(self._places[slot])
        if place not in self._left:
            return None
        sha256 = self._left[place]
        return Unread(0, (place, sha256), sha256 in self._store, partial(self._encode_at, place, sha256))

    def _encode_at(self, place: int, sha256: bytes) -> None:
        samples = self._store.samples(sha256)
        self._encode(place, samples)
        self._samples[place] = len(samples)
        del self._left[place]

    def encode_blank(self) -> None:
        """Encode an audio clip, for the memory that this takes."""
        self._encode(0, np.zeros(self._loaded.model.form.samples, dtype=np.int16))

    def introduce(self, inits: Sequence[SlotInit]) -> None:
        """Note the places of choices that take slots."""
        for init in inits:
            self._places[init.slot] = 0 if init.audio is None else init.audio.place
        self._transcripts.introduce(inits)
        if self._times is not None:
            self._times.introduce(inits)

    def begin(self, rows: Sequence[Row]) -> StepCross:
        """Return the cross-attention of a step."""
        counts = [row.count for row in rows]
        self._cache.plan(self._backend, self._places[[row.slot for row in rows]].repeat(counts))
        wanted = self._times is not None and self._times.begin(rows)
        return StepCross(self._cache.pool, self._backend, self._times if wanted else None)

    def with_times(self, rows: Sequence[Row], prompts: list[PromptLogprobs]) -> list[PromptLogprobs]:
        """Return the log-probabilities of a step's prompts with the times of texts that are computed whole."""
        if self._times is None:
            return prompts
        found = {part.row: part for part in prompts}
        for index, row in enumerate(rows):
            place = int(self._places[row.slot])
            times = self._times.of(row, partial(self._cache.keys, place), int(self._samples[place]))
            if times is not None:
                found[index] = replace(found.get(index) or no_logprobs(index), times=times)
        return [*found.values()]

    def restrict(self, logits: torch.Tensor, slots: Array, positions: Array, known: Tokens) -> None:
        """See `SlotTranscripts.restrict`."""
        self._transcripts.restrict(logits, slots, positions, known)

    def _encode(self, place: int, samples: np.ndarray[tuple[int], np.dtype[np.int16]]) -> None:
        hidden = self._loaded.encoder(samples)
        for layer in self._loaded.layers:
            self._cache.store(place, layer, hidden)


class AudioMemory(NamedTuple):
    """Memory for the audio clips of a model's requests, kept when its weights change."""

    store: AudioStore
    cache: CrossCache
    capacity: AudioCapacity

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """Tensors of the cache."""
        return self.cache.tensors

    @classmethod
    def of(
        cls, loaded: LoadedAudio | None, options: WorkerOptions, config: object, device: torch.device
    ) -> "AudioMemory | None":
        """Allocate the memory; None for a model that takes no audio."""
        if loaded is None or not isinstance(config, ModelConfig):
            return None
        form, positions = loaded.model.form, loaded.model.positions
        cache = CrossCache(options, config, positions, [layer.layer_id for layer in loaded.layers], device)
        logger.info("encoded audio clips: places=%d memory=%.2f GiB", cache.places, cache.bytes / 2**30)
        return cls(AudioStore(form), cache, AudioCapacity(form=form, places=cache.places))
