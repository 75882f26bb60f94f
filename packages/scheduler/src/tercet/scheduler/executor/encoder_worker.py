"""The executor of encoders: models that return one vector, or the scores of a classifier, for each input."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from tercet.protocol.messages.values import Task
from tercet.scheduler.architectures import is_decoder, named_architecture, split_architecture
from tercet.scheduler.core.embedding.plan import EncodePlan, EncoderCapacity, EncodeResult, EncodeRow
from tercet.scheduler.device.cpu_threads import limit_torch_threads
from tercet.scheduler.device.device_memory import total_bytes
from tercet.scheduler.device.devices import select_device
from tercet.scheduler.device.host_copies import start_copies
from tercet.scheduler.device.oom import SplitOnOom, SuppressOom, again, release_cached, require_memory
from tercet.scheduler.device.staging import HostToDevice
from tercet.scheduler.executor.chunked_model import report_layers
from tercet.scheduler.executor.loading import reading_model
from tercet.scheduler.model_files import read_json
from tercet.scheduler.model_task import Pooling, read_sentences
from tercet.scheduler.models.config.model_config import computed_dtype
from tercet.scheduler.models.layers.packed import Packed
from tercet.scheduler.models.registry import build_encoder
from tercet.scheduler.models.weights.encoder_weights import load_encoder_weights
from tercet.scheduler.models.weights.weights import Progress, dummy_weights
from tercet.scheduler.ports import Advance

logger = logging.getLogger(__name__)

_POOLS: dict[Pooling, Callable[[Packed, torch.Tensor], torch.Tensor]] = {
    "cls": Packed.first,
    "last": Packed.last,
    "max": Packed.largest,
    "mean": Packed.mean,
}
_TABLES_PART = 8
"""The tables of all positions may take 1/8 of total memory."""
_POSITION_BYTES = 4096
"""Bytes per position: angles, cosines and sines of 256 elements in float32, and copies of them."""


@dataclass(frozen=True, kw_only=True)
class EncoderOptions:
    """Options of an encoder worker."""

    model: Path
    """Model directory."""
    task: Task
    """EMBED or CLASSIFY."""
    dtype: str = "auto"
    """auto (see `served_dtype`), float32, float16 or bfloat16."""
    device: str = "auto"
    """auto (cuda if available), or a device in torch's notation."""
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    """dummy fills the model with random weights."""
    context_length: int | None = None
    """Maximum input length in tokens; the default and upper bound is the model's own limit."""
    threads: int | None = None
    """Cores that torch uses; the default is all cores that this process may run on."""


class EncoderWorker:
    """The `Encoder` port. Inputs of a step are sorted by length and packed without padding.

    A step that does not fit in memory is computed in halves; only an input that does not fit alone fails.
    """

    def __init__(
        self, options: EncoderOptions, progress: Progress | None = None, advance: Advance = lambda: None
    ) -> None:
        device = select_device(options.device)
        limit_torch_threads(options.threads)
        with reading_model(options.model):
            dtype = computed_dtype(options.model, options.dtype, device, encoder=True)
            config = read_json(options.model / "config.json")
            family, _ = split_architecture(named_architecture(config))
            causal = is_decoder(family) and config.get("is_causal", True) is True
            sentences = read_sentences(options.model, causal=causal, task=options.task)
        longest = min(options.context_length or sentences.max_length, sentences.max_length, _max_positions(device))
        with require_memory("the model's weights"), reading_model(options.model):
            model = build_encoder(config, options.task, dtype, device, longest)
        context_length = _context_length(options, min(model.context_length, sentences.max_length))
        with require_memory("the model's weights"), reading_model(options.model):
            if options.load_format == "dummy":
                dummy_weights(model.module)
            else:
                load_encoder_weights(model.module, options.model, progress)
        if device.type == "cpu":
            report_layers(model.module, advance)
        self._model = model
        self._device = device
        self._to_device = HostToDevice(device)
        self._in_halves = SplitOnOom("tokens")
        self._pool = _POOLS[sentences.pooling]
        self._normalize = sentences.normalize
        self._dimensions = min(sentences.dimensions or model.hidden_size, model.hidden_size)
        self._capacity = EncoderCapacity(
            context_length=context_length,
            vocab_size=model.vocab_size,
            token_types=model.token_types,
            width=len(model.labels) or self._dimensions,
        )
        self.labels = list(model.labels)
        """Names of the scores; empty for an embedding model."""

    @property
    def capacity(self) -> EncoderCapacity:
        """Return the limits, which are fixed once the worker is built."""
        return self._capacity

    @torch.inference_mode()
    def submit(self, plan: EncodePlan) -> "PendingVectors":
        """Start a step. Steps run in the order of submission; on a GPU the next may be submitted before one is done."""
        order = sorted(range(len(plan.rows)), key=lambda row: len(plan.rows[row].input_ids))
        vectors, too_large = self._encode([plan.rows[row] for row in order])
        in_order = torch.empty_like(vectors)
        (places,) = self._to_device.send([np.array(order, dtype=np.int64)])
        in_order[places] = vectors
        return PendingVectors(plan.step, in_order, sorted(order[place] for place in too_large))

    def close(self) -> None:
        """Do nothing: no thread or process belongs to the worker."""

    def _encode(self, rows: Sequence[EncodeRow]) -> tuple[torch.Tensor, list[int]]:
        """Return float32 [rows, width] of rows sorted by length, and the indices of rows that did not fit in memory."""
        too_large: list[int] = []

        def tokens(part: slice) -> int:
            return sum(len(row.input_ids) for row in rows[part]) // 4

        def encode(part: slice) -> torch.Tensor:
            if part.stop - part.start > 1:
                return self._compute(rows[part])
            with SuppressOom():
                return again(lambda: self._compute(rows[part]), release_cached)
            release_cached()
            logger.warning("encoder: input failed, out of memory: tokens=%d; lower --context-length", tokens(part))
            too_large.append(part.start)
            return torch.zeros(1, self._capacity.width, device=self._device)

        return torch.cat(self._in_halves(encode, slice(0, len(rows)), tokens)), too_large

    def _compute(self, rows: Sequence[EncodeRow]) -> torch.Tensor:
        packed = self._packed(rows)
        hidden = self._model.module(packed)
        score = self._model.scores
        return self._vectors(hidden, packed) if score is None else score(hidden, packed).float()

    def _packed(self, rows: Sequence[EncodeRow]) -> Packed:
        lengths = [len(row.input_ids) // 4 for row in rows]
        ids = self._tensor(b"".join(row.input_ids for row in rows))
        types = None
        if any(row.token_types for row in rows):
            types = self._tensor(b"".join(row.token_types or bytes(len(row.input_ids)) for row in rows))
        return Packed(ids, types, lengths, causal=self._model.causal)

    def _tensor(self, ints: bytes) -> torch.Tensor:
        (sent,) = self._to_device.send([np.frombuffer(bytearray(ints), dtype="<i4")])
        return sent.long()

    def _vectors(self, hidden: torch.Tensor, packed: Packed) -> torch.Tensor:
        """Return float32 [inputs, width]."""
        vectors = self._pool(packed, hidden.float())
        vectors = torch.nn.functional.normalize(vectors, dim=-1) if self._normalize else vectors
        return vectors[:, : self._dimensions]


class PendingVectors:
    """A step whose vectors are being copied from the device."""

    def __init__(self, step: int, vectors: torch.Tensor, too_large: Sequence[int] = ()) -> None:
        self._step = step
        (self._vectors,), self._copied = start_copies([vectors], vectors.device)
        self._too_large = list(too_large)

    def result(self) -> EncodeResult:
        """Wait for this step, but not for later ones."""
        if self._copied is not None:
            self._copied.synchronize()
        vectors = self._vectors
        finite = torch.isfinite(vectors).all(dim=-1)
        return EncodeResult(
            step=self._step,
            vectors=vectors.numpy().astype("<f4", copy=False).tobytes(),
            failed=(~finite).nonzero().flatten().tolist(),
            too_large=self._too_large,
        )


def _max_positions(device: torch.device) -> int:
    """Return the number of positions for which tables may be made, regardless of the config."""
    return total_bytes(device) // _TABLES_PART // _POSITION_BYTES


def _context_length(options: EncoderOptions, longest: int) -> int:
    wanted = options.context_length or longest
    if wanted > longest:
        raise ValueError(f"context_length {wanted} is beyond the model's {longest}")
    return wanted
