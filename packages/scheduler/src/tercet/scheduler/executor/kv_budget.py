"""The memory budget of the cache: shape of a KV page, number of pages, and number of snapshots of recurrent states."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from tercet.kernels.attention.api import AttentionBackend
from tercet.scheduler.device.device_memory import available_bytes, shares_host_memory, total_bytes
from tercet.scheduler.executor.kv_pool import KVShape
from tercet.scheduler.executor.model_runner import Model
from tercet.scheduler.executor.sampling.sampler import SamplingOps
from tercet.scheduler.executor.warmup import measured_kv_bytes, profile_run
from tercet.scheduler.executor.worker_options import KV_DTYPES, WorkerOptions
from tercet.scheduler.models.config.model_config import DecoderShape, ModelConfig
from tercet.scheduler.models.config.recurrent_config import StateTensor
from tercet.scheduler.models.layers.shard import Shard

_OWN_SHARE, _SHARED_SHARE = 0.9, 0.5
"""Shares of free memory for the KV cache: of dedicated device memory, and of memory that other programs share."""
_SNAPSHOT_SHARE = 0.25
"""Share for snapshots of the memory that the states of all slots leave."""
_TABLES_PART = 8
"""The tables of all positions may take 1/8 of total memory."""
_ROPE_BYTES = 16
"""Bytes per position and head element: angles, cosines and sines in float32, and copies of them."""
_SLOT_BYTES = 8
"""Bytes per position and slot: a token id and a share of a page id."""


def kv_shape(options: WorkerOptions, config: DecoderShape, shard: Shard) -> KVShape:
    """Return the shape of this rank's KV pages."""
    latent = config.latent if isinstance(config, ModelConfig) else None
    return KVShape(
        page_size=options.page_size,
        kv_heads=len(shard.shared_span(config.kv_heads, "key-value heads")),
        head_dim=config.head_dim,
        dtype=KV_DTYPES.get(options.kv_cache_dtype, config.dtype),
        rank=0 if latent is None else latent.rank,
    )


def state_layers(config: DecoderShape) -> Mapping[int, Sequence[StateTensor]]:
    """Return the tensors of one sequence's state in each recurrent layer."""
    if not isinstance(config, ModelConfig) or config.recurrent is None:
        return {}
    return dict.fromkeys(sorted(config.recurrent.layers), config.recurrent.state_tensors(config.dtype))


class CacheSizes(NamedTuple):
    """Number of KV pages, and of snapshots of recurrent states; None for models without."""

    pages: int
    snapshots: int | None


@dataclass(frozen=True)
class KVBudget:
    """The memory of one rank; `config` has the served context length."""

    options: WorkerOptions
    config: DecoderShape
    shape: KVShape
    device: torch.device
    shard: Shard

    def longest_context(self) -> int:
        """Return the most tokens of one sequence that total memory can hold, in the cache and in tables of positions
        and slots.

        All ranks get the same number. A config may claim any length, and such tables are made for the length that is
        served.
        """
        memory = total_bytes(self.device)
        cached = memory // self._page_bytes * self.options.page_size
        in_tables = memory // _TABLES_PART // (_ROPE_BYTES * self.config.head_dim + _SLOT_BYTES * self.options.rows)
        return max(1, self.shard.collectives.all_reduce_min(min(cached, in_tables)))

    def check(self) -> None:
        """Raise ValueError for a KV cache larger than total memory: the OS may overcommit and kill the process
        later.
        """
        given = self.options.kv_cache_bytes
        if given is None:
            return
        sizes = self._sizes_in(given)
        wanted = sizes.pages * self._page_bytes
        if sizes.snapshots is not None:
            wanted += (self.options.rows + sizes.snapshots) * self._state_bytes
        if self.device.type != "cuda":
            wanted *= self.shard.size
        if wanted > (total := total_bytes(self.device)):
            raise ValueError(
                f"kv_cache_bytes {given}: a KV cache of {wanted} bytes is more than all memory, {total} bytes"
            )

    def sizes(self, model: Model, backend: Callable[[], AttentionBackend], ops: SamplingOps) -> CacheSizes:
        """Return the sizes, the same in all ranks. Raise ValueError if memory does not hold one page."""
        given = self.options.kv_cache_bytes
        if given is None:
            given = self._free_bytes(model, backend, ops)
        pages, snapshots = self._sizes_in(given)
        return CacheSizes(self.shard.collectives.all_reduce_min(pages), snapshots)

    def _free_bytes(self, model: Model, backend: Callable[[], AttentionBackend], ops: SamplingOps) -> int:
        """Return a share of free memory; on a GPU, after a profile run of the largest possible step.

        A CPU's free memory is divided among the ranks. If a GPU shares memory with the host, the smaller share applies,
        as on a CPU. `mem_fraction_static` replaces the smaller share.
        """
        options, config, device = self.options, self.config, self.device
        static = self._static_bytes()
        share = _SHARED_SHARE if shares_host_memory(device) and static is None else _OWN_SHARE
        if device.type != "cuda":
            free = available_bytes(device) * share
            return int((free if static is None else min(free, static)) / self.shard.size)
        run = partial(
            profile_run,
            model,
            backend,
            ops,
            self.shape,
            layers=config.cached_layers,
            states=state_layers(config),
            slots=options.rows,
            tokens=options.step_tokens,
            context_length=config.context_length,
            vocab_size=config.vocab_size,
            device=device,
        )
        free = measured_kv_bytes(partial(available_bytes, device), run, share, options.step_tokens)
        return free if static is None else min(free, static)

    def _static_bytes(self) -> int | None:
        """Return the bytes of `mem_fraction_static` that the loaded weights leave. Raise ValueError for none."""
        fraction = self.options.mem_fraction_static
        if fraction is None:
            return None
        reserved = (1 - fraction) * total_bytes(self.device)
        if (static := int(available_bytes(self.device) - reserved)) <= 0:
            raise ValueError(f"mem_fraction_static {fraction}: memory in use and the weights leave none of this share")
        return static

    @property
    def _page_bytes(self) -> int:
        """Bytes of a page in all layers."""
        return self.shape.page_bytes * len(self.config.cached_layers)

    @property
    def _state_bytes(self) -> int:
        """Bytes of the recurrent state of one sequence in all layers."""
        return sum(tensor.bytes for tensors in state_layers(self.config).values() for tensor in tensors)

    def _sizes_in(self, given: int) -> CacheSizes:
        """Divide bytes among pages, the states of all slots, and snapshots: at least one for each slot."""
        if not (state := self._state_bytes):
            return CacheSizes(self._pages_in(given), None)
        slots = self.options.slots
        fixed = (self.options.rows + slots) * state
        rest = given - fixed
        if rest < self._page_bytes:
            raise ValueError(
                f"{given} bytes of KV cache do not hold a page, and {fixed} bytes of states and snapshots for {slots} "
                f"sequences: lower max_running_requests"
            )
        snapshots = min(int(rest * _SNAPSHOT_SHARE) // state, self._pages_in(rest))
        return CacheSizes(self._pages_in(max(self._page_bytes, rest - snapshots * state)), slots + snapshots)

    def _pages_in(self, given: int) -> int:
        """Return the pages that fit in `given` bytes, at most those that slots or `max_total_tokens` allow.

        Raise ValueError for none.
        """
        pages = given // self._page_bytes
        if pages < 1:
            raise ValueError(f"{given} bytes of KV cache do not hold one page of {self._page_bytes} bytes")
        most = self.options.slots * -(-self.config.context_length // self.options.page_size)
        if self.options.max_total_tokens is not None:
            most = min(most, self.options.max_total_tokens // self.options.page_size)
        return min(pages, most)
