"""The memory budget of the cache: shape of a KV page, pages of each cache group, and snapshots of recurrent states."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from tercet.kernels.attention.api import AttentionBackend
from tercet.scheduler.core.plan import Plan
from tercet.scheduler.core.window_pages import window_pages
from tercet.scheduler.device.cpu_threads import allowed_cores
from tercet.scheduler.device.device_memory import available_bytes, shares_host_memory, total_bytes
from tercet.scheduler.executor.graphs.precompile import precompile
from tercet.scheduler.executor.graphs.warmup import (
    measured_kv_bytes,
    one_page_runner,
    ordinary_plans,
    profile_run,
    worst_plan,
)
from tercet.scheduler.executor.kv_pool import KVGroup, KVShape
from tercet.scheduler.executor.media.audio import StepAudio
from tercet.scheduler.executor.media.prompt_media import LoadedMedia
from tercet.scheduler.executor.media.texts import StepTexts
from tercet.scheduler.executor.model_runner import Model, ModelRunner
from tercet.scheduler.executor.sampling.sampler import SamplingOps
from tercet.scheduler.executor.state_pool import StatePool
from tercet.scheduler.executor.worker_options import KV_DTYPES, WorkerOptions
from tercet.scheduler.models.config.model_config import DecoderShape, HeadShape, ModelConfig
from tercet.scheduler.models.config.recurrent_config import StateTensor
from tercet.scheduler.models.layers.shard import WHOLE, Shard

_OWN_SHARE, _SHARED_SHARE = 0.9, 0.5
"""Shares of free memory for the KV cache: of dedicated device memory, and of memory that other programs share."""
_SNAPSHOT_SHARE = 0.25
"""Share for snapshots of the memory that the states of all slots leave."""
_WINDOW_SHARE = 0.125
"""Share for cached windows of the memory that the windows of running choices leave."""
_TABLES_PART = 8
"""The tables of all positions may take 1/8 of total memory."""
_ROPE_BYTES = 16
"""Bytes per position and head element: angles, cosines and sines in float32, and copies of them."""
_PAGE_RECORD = 64
"""Bytes of the core's records of a page: all that a page costs in a model without attention."""
_SLOT_BYTES = 8
"""Bytes per position and slot: a token id and a share of a page id."""


def kv_shapes(options: WorkerOptions, config: DecoderShape, shard: Shard) -> Mapping[int, KVShape]:
    """Return the shape of this rank's KV pages in each layer that caches keys and values."""
    latent = config.latent if isinstance(config, ModelConfig) else None

    def shape(heads: HeadShape) -> KVShape:
        return KVShape(
            page_size=options.page_size,
            kv_heads=len(shard.shared_span(heads.kv_heads, "key-value heads")),
            head_dim=heads.head_dim,
            value_dim=heads.value_dim,
            dtype=KV_DTYPES.get(options.kv_cache_dtype, config.dtype),
            rank=0 if latent is None else latent.rank,
        )

    held = shard.stage.layers(config.layers)
    return {layer: shape(config.heads_of(layer)) for layer in config.cached_layers if layer in held}


def state_layers(config: DecoderShape, shard: Shard = WHOLE) -> Mapping[int, Sequence[StateTensor]]:
    """Return the tensors of one sequence's state in each recurrent layer, as a rank has them."""
    if not isinstance(config, ModelConfig) or config.recurrent is None:
        return {}
    return dict.fromkeys(
        sorted(config.recurrent.layers), config.recurrent.share(shard.size).state_tensors(config.dtype)
    )


def state_pool_of(
    options: WorkerOptions, config: DecoderShape, shard: Shard, snapshots: int | None, device: torch.device
) -> StatePool | None:
    """Return the recurrent states of this rank's slots; None for a model without any."""
    if snapshots is None:
        return None
    first = shard.attention.rank * options.own_slots
    return StatePool(state_layers(config, shard), options.own_rows, snapshots, device, first)


def windowed_layers(config: DecoderShape) -> list[int]:
    """Return the layers whose pages outside of a sliding window can be freed; none beside recurrent states."""
    if not isinstance(config, ModelConfig) or config.recurrent is not None:
        return []
    return [layer for layer in config.cached_layers if config.window_of(layer)]


class CacheSizes(NamedTuple):
    """Number of KV pages, and of snapshots of recurrent states; None for models without.

    `window_pages` are those of layers with a sliding window; None if they have as many as the others.
    """

    pages: int
    snapshots: int | None = None
    window_pages: int | None = None


@dataclass(frozen=True)
class KVBudget:
    """The memory of one rank; `config` has the served context length."""

    options: WorkerOptions
    config: DecoderShape
    shapes: Mapping[int, KVShape]
    device: torch.device
    shard: Shard
    images: LoadedMedia | None = None
    encoder: StepAudio | StepTexts | None = None

    def longest_context(self) -> int:
        """Return the most tokens of one sequence that total memory can hold, in the cache and in tables of positions
        and slots.

        All ranks get the same number. A config may claim any length, and such tables are made for the length that is
        served.
        """
        memory = total_bytes(self.device)
        cached = self._divide(memory).pages * self.options.page_size
        in_tables = memory // _TABLES_PART // (_ROPE_BYTES * self.config.head_dim + _SLOT_BYTES * self.options.rows)
        return max(1, self.shard.all_reduce_min(min(cached, in_tables)))

    def check(self) -> None:
        """Raise ValueError for a KV cache larger than total memory: the OS may overcommit and kill the process
        later.
        """
        given = self.options.kv_cache_bytes
        if given is None:
            return
        sizes = self.sizes_in(given)
        wanted = sum(group.pages * shape.page_bytes for group in self.groups(sizes) for shape in group.layers.values())
        if sizes.snapshots is not None:
            wanted += (self.options.own_rows + sizes.snapshots) * self._state_bytes
        if self.device.type != "cuda":
            wanted *= self.options.host_ranks
        if wanted > (total := total_bytes(self.device)):
            raise ValueError(
                f"kv_cache_bytes {given}: a KV cache of {wanted} bytes is more than all memory, {total} bytes"
            )

    def sizes(self, model: Model, backend: Callable[[], AttentionBackend], ops: SamplingOps) -> CacheSizes:
        """Return the sizes, the same in all ranks. Raise ValueError if memory does not hold one page.

        On a GPU, first compile the kernels of steps.
        """
        given = self.options.kv_cache_bytes
        runner = partial(self._runner, model, backend, ops)
        if self.device.type == "cuda":
            precompile(runner, [self._largest, *self._ordinary], len(allowed_cores()) // self.options.host_ranks)
        if given is None:
            given = self._free_bytes(runner)
        if self.shard.stage.count == 1:
            return self.sizes_in(self.shard.all_reduce_min(given))
        return CacheSizes(self.shard.all_reduce_min(self.sizes_in(given).pages))

    def groups(self, sizes: CacheSizes) -> list[KVGroup]:
        """Return the cache groups of a pool with these sizes."""
        if sizes.window_pages is None:
            return [KVGroup(name="full", layers=self.shapes, pages=sizes.pages)]
        windowed = {layer: self.shapes[layer] for layer in windowed_layers(self.config)}
        full = {layer: shape for layer, shape in self.shapes.items() if layer not in windowed}
        window = KVGroup(name="window", layers=windowed, pages=sizes.window_pages, window=self._window)
        return [KVGroup(name="full", layers=full, pages=sizes.pages), window]

    def _runner(self, model: Model, backend: Callable[[], AttentionBackend], ops: SamplingOps) -> ModelRunner:
        options, config = self.options, self.config
        return one_page_runner(
            model,
            backend,
            ops,
            self.shapes,
            states=state_layers(config, self.shard),
            slots=options.rows,
            encoder=self.encoder,
            context_length=config.context_length,
            vocab_size=config.vocab_size,
            device=self.device,
        )

    @property
    def _largest(self) -> Plan:
        options = self.options
        return worst_plan(options.rows, options.step_tokens + self._excess_tokens, self.config.context_length)

    @property
    def _ordinary(self) -> Iterator[Plan]:
        options = self.options
        return ordinary_plans(
            options.rows,
            options.step_tokens,
            self.config.context_length,
            chained=options.draft_rows > 0,
            adapted=False,
        )

    def _free_bytes(self, runner: Callable[[], ModelRunner]) -> int:
        """Return a share of free memory; on a GPU, after a profile run of the largest possible step.

        A CPU's free memory is divided among its ranks. If a GPU shares memory with the host, the smaller share applies,
        as on a CPU. `mem_fraction_static` replaces the smaller share.
        """
        options, device = self.options, self.device
        static = self._static_bytes()
        share = _SHARED_SHARE if shares_host_memory(device) and static is None else _OWN_SHARE
        if device.type != "cuda":
            free = available_bytes(device) * share
            return int((free if static is None else min(free, static)) / self.options.host_ranks)

        def run() -> None:
            profile_run(runner(), self._largest, self.images, self.encoder)

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
    def _excess_tokens(self) -> int:
        """Tokens by which a step may exceed `step_tokens`."""
        return 0 if self.images is None else self.images.excess_tokens

    @property
    def _page_bytes(self) -> int:
        """Bytes of a page in all layers."""
        return max(_PAGE_RECORD, sum(shape.page_bytes for shape in self.shapes.values()))

    @property
    def _state_bytes(self) -> int:
        """Bytes of the recurrent state of one sequence in all layers."""
        return sum(tensor.bytes for tensors in state_layers(self.config, self.shard).values() for tensor in tensors)

    @property
    def _window(self) -> int:
        """Tokens of the longest sliding window."""
        config = self.config
        windows = config.windows if isinstance(config, ModelConfig) else ()
        return max((windows[layer] for layer in windowed_layers(config)), default=0)

    @property
    def _most_pages(self) -> int:
        """The most pages that all slots, or `max_total_tokens`, use."""
        most = self.options.own_slots * -(-self.config.context_length // self.options.page_size)
        if self.options.max_total_tokens is not None:
            most = min(most, self.options.max_total_tokens // self.options.page_size)
        return most

    def sizes_in(self, given: int) -> CacheSizes:
        """Divide bytes among pages, the states of all slots, and snapshots: at least one for each slot.

        More snapshots get the bytes that pages do not need. Raise ValueError if they do not hold a page.
        """
        if state := self._state_bytes:
            return self._with_states(given, state)
        sizes = self._divide(given)
        if sizes.pages < 1:
            raise ValueError(f"{given} bytes of KV cache do not hold one page of {self._page_bytes} bytes")
        return sizes._replace(pages=min(sizes.pages, self._most_pages))

    def _divide(self, given: int) -> CacheSizes:
        """Divide bytes among pages of layers without and with a sliding window.

        The latter get the windows of all slots, but at most half of the pages that equal groups would have, besides
        those for steps; and a share of the rest for cached windows. Groups are equal if fewer tokens fit in this way.
        """
        options, windowed, most = self.options, windowed_layers(self.config), self._most_pages
        equal = CacheSizes(given // self._page_bytes)
        if not windowed or equal.pages >= most or self.shard.stage.count > 1:  # all stages have the same groups
            return equal
        window_bytes = sum(self.shapes[layer].page_bytes for layer in windowed)
        full_bytes = self._page_bytes - window_bytes
        step_tokens = max(options.step_tokens, options.own_slots) + self._excess_tokens
        of_steps, of_one, of_all = (
            window_pages(self._window, options.page_size, choices, step_tokens) for choices in (0, 1, options.own_slots)
        )
        running = max(of_one, min(of_all, of_steps + equal.pages // 2))
        rest = given - running * window_bytes
        spare = int(max(rest * _WINDOW_SHARE, rest - most * full_bytes)) // window_bytes
        spare = max(0, min(spare, most - running))
        pages = (rest - spare * window_bytes) // full_bytes if full_bytes else most
        return CacheSizes(pages, window_pages=running + spare) if rest > 0 and pages > equal.pages else equal

    def _with_states(self, given: int, state: int) -> CacheSizes:
        """Divide bytes for a model whose recurrent states take `state` bytes for each sequence."""
        slots = self.options.own_slots
        fixed = (self.options.own_rows + slots) * state
        rest = given - fixed
        if rest < self._page_bytes:
            raise ValueError(
                f"{given} bytes of KV cache do not hold a page, and {fixed} bytes of states and snapshots for {slots} "
                f"sequences: lower max_running_requests"
            )
        snapshots = int(rest * _SNAPSHOT_SHARE) // state
        pages = self._pages_in(max(self._page_bytes, rest - snapshots * state))
        snapshots = min((rest - pages * self._page_bytes) // state, self._pages_in(rest))
        return CacheSizes(pages, slots + snapshots)

    def _pages_in(self, given: int) -> int:
        """Return the pages that fit in `given` bytes and can be used."""
        return min(given // self._page_bytes, self._most_pages)
