"""What an operator can choose about model execution."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from tercet.kernels.native.linear import Quantization
from tercet.kernels.ops.store_kv import E4M3

KV_DTYPES = {"bfloat16": torch.bfloat16, "fp8_e4m3": E4M3}
"""Number formats of keys and values by name, but for "auto", that of the model."""


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The options of one worker: what an operator chose, and what follows from it."""

    model: Path
    """A model directory."""
    weights: Path | None = None
    """The directory of other weights for it."""
    dtype: str = "auto"
    """auto (see `served_dtype`), float32, float16 or bfloat16."""
    device: str = "auto"
    """auto (cuda where there is one), or a device as torch names it."""
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    """dummy fills a model with cheap random weights, quantised on a GPU where config.json says so."""
    slots: int = 64
    """Most choices that run at once."""
    context_length: int | None = None
    """Longest request, no longer than the model's own limit, which is the default."""
    page_size: int = 16
    """Tokens of a KV page."""
    kv_cache_bytes: int | None = None
    """Memory of the KV cache; by default a share of what is available."""
    kv_cache_dtype: str = "auto"
    """auto (the model's), bfloat16, or fp8_e4m3 in half the memory."""
    kv_cache_share: float | None = None
    """The share of memory available after loading that the KV cache takes; half on a CPU, most of it on a GPU."""
    step_tokens: int = 512
    """Most tokens of one step."""
    attention_backend: str = "auto"
    """auto, or a backend of tercet.kernels; cpu runs the whole model on native kernels."""
    quantization: Quantization = "none"
    """int8 and int4 round weights as they are loaded, and activations to 8 bits; on native kernels only."""
    threads: int | None = None
    """Cores that a model on a CPU uses; by default all that this process may run on."""
    overlap: bool = False
    """On a CPU, run steps in a thread of their own. An accelerator overlaps by itself."""
    grammar_backend: str = "llguidance"
    """What reads grammars; none refuses them."""
    max_loras: int = 0
    """Adapters that can run side by side; their memory is set aside."""
    max_lora_rank: int = 64
    """The highest rank that an adapter can have."""
    draft_rows: int = 0
    """Most rows of a step in which choices have several; 0 if they never have."""
    fast_forward: bool = True
    """Tokens that a grammar leaves no choice about take no step of their own."""

    @property
    def rows(self) -> int:
        """Most rows of a step in which each has one token."""
        return max(self.slots, self.draft_rows)

    @property
    def checkpoint(self) -> Path:
        """The directory that weights are in."""
        return self.weights or self.model

    def __post_init__(self) -> None:
        if self.kv_cache_dtype != "auto" and self.kv_cache_dtype not in KV_DTYPES:
            raise ValueError(f"kv_cache_dtype must be auto, {' or '.join(KV_DTYPES)}, not {self.kv_cache_dtype!r}")
        if self.threads is not None and self.threads < 1:
            raise ValueError("threads must be at least 1")
        if self.slots < 1 or self.page_size < 1 or self.step_tokens < 1:
            raise ValueError("slots, page_size and step_tokens must be at least 1")
        if self.draft_rows < 0:
            raise ValueError("draft_rows must be at least 0")
        if self.max_loras < 0 or self.max_lora_rank < 1:
            raise ValueError("max_loras must be at least 0 and max_lora_rank at least 1")
        if self.kv_cache_share is not None and not 0 < self.kv_cache_share <= 1:
            raise ValueError("kv_cache_share must be above 0 and at most 1")
        if self.context_length is not None and self.context_length < 1:
            raise ValueError("context_length must be at least 1")


def encode_options(options: WorkerOptions) -> msgspec.Raw:
    """As JSON, for a process of the same version."""
    return msgspec.Raw(msgspec.json.encode(options, enc_hook=str))


def decode_options(encoded: msgspec.Raw) -> WorkerOptions:
    """The options in such JSON. Raises ValueError for anything else."""
    return msgspec.json.decode(encoded, type=WorkerOptions, dec_hook=_read)


def _read(kind: type[Any], text: str) -> object:
    """What JSON has no form of."""
    if kind is not Path:
        raise NotImplementedError(kind)
    return Path(text)
