"""`KVBudget`: how many pages of keys and values there is memory for, and what is cached in them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from tercet.kernels.attention.api import AttentionBackend
from tercet.scheduler.device.device_memory import available_bytes, is_hosts_own, total_bytes
from tercet.scheduler.executor.kv_pool import KVShape
from tercet.scheduler.executor.model_runner import Model
from tercet.scheduler.executor.sampling.sampler import SamplingOps
from tercet.scheduler.executor.warmup import measured_kv_bytes, profile_run
from tercet.scheduler.executor.worker_options import KV_DTYPES, WorkerOptions
from tercet.scheduler.models.config.model_config import DecoderShape, ModelConfig
from tercet.scheduler.models.layers.shard import Shard

_OWN_SHARE, _SHARED_SHARE = 0.9, 0.5
"""Of what is free: of a device's own memory, and of memory that this machine's other programs have, too."""
_TABLES_PART = 8
"""One part in so many of all memory may hold tables of all positions."""
_ROPE_BYTES = 16
"""Of a position and an element of a head: angles, cosines and sines in float32, and copies of these."""
_SLOT_BYTES = 8
"""Of a position and a slot: a token, and its share of a page's number."""


def kv_shape(options: WorkerOptions, config: DecoderShape, shard: Shard) -> KVShape:
    """What this process caches."""
    latent = config.latent if isinstance(config, ModelConfig) else None
    return KVShape(
        page_size=options.page_size,
        kv_heads=len(shard.shared_span(config.kv_heads, "key-value heads")),
        head_dim=config.head_dim,
        dtype=KV_DTYPES.get(options.kv_cache_dtype, config.dtype),
        rank=0 if latent is None else latent.rank,
    )


@dataclass(frozen=True)
class KVBudget:
    """The memory of one process among those that share a model; `config` has the context length that is served."""

    options: WorkerOptions
    config: DecoderShape
    shape: KVShape
    device: torch.device
    shard: Shard

    def longest_context(self) -> int:
        """How many tokens of one text all memory could hold: in the cache, and in tables of all positions and slots.

        The same in all processes. A config may name any length, and such tables are made for the length that is served.
        """
        memory = total_bytes(self.device)
        cached = memory // self._page_bytes * self.options.page_size
        in_tables = memory // _TABLES_PART // (_ROPE_BYTES * self.config.head_dim + _SLOT_BYTES * self.options.rows)
        return max(1, self.shard.collectives.smallest(min(cached, in_tables)))

    def check(self) -> None:
        """Raises ValueError for a KV cache beyond all memory: a system may promise it, and end who takes it."""
        given = self.options.kv_cache_bytes
        if given is None:
            return
        wanted = self._pages_in(given) * self._page_bytes
        if self.device.type != "cuda":
            wanted *= self.shard.size
        if wanted > (total := total_bytes(self.device)):
            raise ValueError(
                f"kv_cache_bytes {given}: a KV cache of {wanted} bytes is more than all memory, {total} bytes"
            )

    def pages(self, model: Model, backend: Callable[[], AttentionBackend], ops: SamplingOps) -> int:
        """How many pages there are: for all processes as many. Raises ValueError where there is no memory for one."""
        given = self.options.kv_cache_bytes
        if given is None:
            given = self._free_bytes(model, backend, ops)
        return self.shard.collectives.smallest(self._pages_in(given))

    def _free_bytes(self, model: Model, backend: Callable[[], AttentionBackend], ops: SamplingOps) -> int:
        """A share of what is free, on a GPU after the worst step it will ever have to run.

        What is free on a CPU is for all processes that share the model. Of memory that a GPU shares with the machine
        much is left, as on a CPU.
        """
        options, config, device = self.options, self.config, self.device
        share = options.kv_cache_share or (_SHARED_SHARE if is_hosts_own(device) else _OWN_SHARE)
        if device.type != "cuda":
            return int(available_bytes(device) * share / self.shard.size)
        run = partial(
            profile_run,
            model,
            backend,
            ops,
            self.shape,
            layers=range(config.layers),
            slots=options.rows,
            tokens=options.step_tokens,
            context_length=config.context_length,
            vocab_size=config.vocab_size,
            device=device,
        )
        return measured_kv_bytes(partial(available_bytes, device), run, share, options.step_tokens)

    @property
    def _page_bytes(self) -> int:
        """Of a page in all layers."""
        return self.shape.page_bytes * self.config.layers

    def _pages_in(self, given: int) -> int:
        """As many as the memory gives, but no more than all slots could fill. Raises ValueError for none at all."""
        pages = given // self._page_bytes
        if pages < 1:
            raise ValueError(f"{given} bytes of KV cache do not hold one page of {self._page_bytes} bytes")
        return min(pages, self.options.slots * -(-self.config.context_length // self.options.page_size))
