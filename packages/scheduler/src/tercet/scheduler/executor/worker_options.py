"""Options of model execution."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from tercet.kernels.native.linear import Quantization
from tercet.kernels.ops.store_kv import E4M3

KV_DTYPES = {"bfloat16": torch.bfloat16, "fp8_e4m3": E4M3}
"""Dtypes of the KV cache by name; "auto" means the model's."""


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The options of one worker, as chosen by an operator, and their derived values."""

    model: Path
    """Model directory."""
    weights: Path | None = None
    """Directory of replacement weights."""
    dtype: str = "auto"
    """auto (see `served_dtype`), float32, float16 or bfloat16."""
    device: str = "auto"
    """auto (cuda if available), or a device in torch's notation."""
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    """dummy fills the model with random weights, quantized on a GPU if config.json says so."""
    slots: int = 64
    """Maximum number of running choices."""
    context_length: int | None = None
    """Maximum request length in tokens; the default and upper bound is the model's own limit."""
    page_size: int = 16
    """Tokens per KV page."""
    kv_cache_bytes: int | None = None
    """Bytes of the KV cache; the default is a share of available memory."""
    kv_cache_dtype: str = "auto"
    """auto (the model's), bfloat16, or fp8_e4m3, which takes half the memory."""
    mem_fraction_static: float | None = None
    """Share of total memory for the weights and the KV cache; by default the cache is a share of what is available."""
    max_total_tokens: int | None = None
    """Maximum tokens of the KV cache."""
    step_tokens: int = 512
    """Maximum tokens per step."""
    attention_backend: str = "auto"
    """auto, or a backend of tercet.kernels; cpu runs the whole model on native kernels."""
    quantization: Quantization = "none"
    """int8 and int4 round weights at loading and activations to 8 bits; native kernels only."""
    threads: int | None = None
    """Cores for a model on a CPU; the default is all cores that this process may run on."""
    overlap: bool = False
    """Run steps in a separate thread on a CPU. An accelerator overlaps without it."""
    grammar_backend: str = "llguidance"
    """The library that compiles grammars; none refuses them."""
    logprobs_mode: Literal["raw", "processed"] = "raw"
    """Distribution of reported log-probabilities: the model's, or the one that is sampled before filters."""
    max_loras: int = 0
    """Number of adapter slots; their memory is allocated at start."""
    max_lora_rank: int = 64
    """Maximum rank of an adapter."""
    draft_rows: int = 0
    """Maximum rows of a step in which choices have several; 0 if they never do."""
    fast_forward: bool = True
    """Append tokens that a grammar forces without a step of their own."""
    expert_parallel_size: int = 1
    """Groups of the ranks of tensor parallelism, each with some experts of every mixture."""
    expert_loads: tuple[tuple[int, ...], ...] = ()
    """Load of each expert by layer, for their placement; empty for layers whose experts are divided evenly."""
    redundant_experts: int = 0
    """Places beside one for each expert, in layers with loads."""
    attention_ranks: int = 1
    """Ranks with a KV cache for requests of their own, and equal shares of the slots. `step_tokens` are of each."""
    language_only: bool = False
    """Take embeddings in the place of images or sounds, and load no tower."""
    host_ranks: int = 1
    """Ranks of the model on this machine, which share its memory if they run on a CPU."""

    @property
    def rows(self) -> int:
        """Maximum rows of a step in which each row has one token."""
        return max(self.slots, self.draft_rows)

    @property
    def own_slots(self) -> int:
        """Slots of each attention rank."""
        return self.slots // self.attention_ranks

    @property
    def own_rows(self) -> int:
        """Slots of each attention rank that steps before any request use."""
        return self.rows if self.attention_ranks == 1 else self.own_slots

    @property
    def checkpoint(self) -> Path:
        """Directory of the weights."""
        return self.weights or self.model

    def __post_init__(self) -> None:
        if self.kv_cache_dtype != "auto" and self.kv_cache_dtype not in KV_DTYPES:
            raise ValueError(f"kv_cache_dtype must be auto, {' or '.join(KV_DTYPES)}, not {self.kv_cache_dtype!r}")
        if self.threads is not None and self.threads < 1:
            raise ValueError("threads must be at least 1")
        if self.slots < 1 or self.page_size < 1 or self.step_tokens < 1:
            raise ValueError("slots, page_size and step_tokens must be at least 1")
        if self.attention_ranks < 1 or self.slots % self.attention_ranks:
            raise ValueError("slots must be a multiple of attention_ranks")
        if self.draft_rows < 0:
            raise ValueError("draft_rows must be at least 0")
        if self.max_loras < 0 or self.max_lora_rank < 1:
            raise ValueError("max_loras must be at least 0 and max_lora_rank at least 1")
        if self.mem_fraction_static is not None and not 0 < self.mem_fraction_static < 1:
            raise ValueError("mem_fraction_static must be above 0 and below 1")
        if self.max_total_tokens is not None and self.max_total_tokens < self.page_size:
            raise ValueError("max_total_tokens must be at least the page_size")
        if self.context_length is not None and self.context_length < 1:
            raise ValueError("context_length must be at least 1")


def encode_options(options: WorkerOptions) -> msgspec.Raw:
    """Encode options as JSON, for a process of the same version."""
    return msgspec.Raw(msgspec.json.encode(options, enc_hook=str))


def decode_options(encoded: msgspec.Raw) -> WorkerOptions:
    """Decode options from JSON. Raise ValueError for anything else."""
    return msgspec.json.decode(encoded, type=WorkerOptions, dec_hook=_read)


def _read(kind: type[Any], text: str) -> object:
    """Convert values that JSON has no type for."""
    if kind is not Path:
        raise NotImplementedError(kind)
    return Path(text)
