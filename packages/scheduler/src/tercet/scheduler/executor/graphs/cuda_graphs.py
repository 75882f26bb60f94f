"""CUDA graphs of decode steps, so that a GPU never waits for Python to launch kernels.

A graph reads fixed memory (`DecodeInputBuffers`), into which every decode is written, and has a fixed number of rows,
its *bucket*. A step is replayed by the smallest bucket that holds it, with padding behind its rows. Steps that are not
decodes or fit no bucket run eagerly. Graphs are captured one at a time between steps, so that start-up does not wait
for them. The largest comes first: smaller ones reuse the memory of its pool.

Steps in which a row has an adapter have graphs of their own, captured once such a step occurs. In these, each row is a
segment of `LoRARows`, which is empty if the row has no adapter. Steps in which slots have several consecutive rows
(speculative decoding) have graphs of their own, too: a separate kernel stores the new tokens before attention.

Sampling, from the hidden states to the tokens in their slots, is captured once a step has asked for it: for each
bucket, and for each manner in which all rows of a step are sampled. Steps that mix manners are sampled eagerly.

A graph has attention backends of its own. Their `plan` is called for every step that the graph replays, because some
prepare on the host what the captured kernels then read.
"""

import logging
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple, Protocol

import torch

from tercet.kernels.attention.api import AttentionBackend, AttentionBatch
from tercet.kernels.attention.select import graph_backend
from tercet.scheduler.device.oom import SuppressOom, release_cached
from tercet.scheduler.executor.forward_batch import ForwardBatch
from tercet.scheduler.executor.graphs.graph_inputs import DecodeInputViews
from tercet.scheduler.executor.kv_pool import KVPool
from tercet.scheduler.executor.lora.adapters import StepAdapters
from tercet.scheduler.executor.model_runner import Model
from tercet.scheduler.executor.sampling.sampler import Sampler
from tercet.scheduler.executor.sampling.slot_params import SamplingMode
from tercet.scheduler.executor.slot_tables import SlotTables, StepInputs

logger = logging.getLogger(__name__)

_FINE, _COARSE = 64, 16
"""Buckets are 1, 2 and 4, then multiples of 8 up to `_FINE`, then multiples of `_COARSE`."""


class Recorder(Protocol):
    """The interface of a device that records work."""

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Record `run`. Return a function that runs it again, and the tensor that then holds its result."""
        ...


class CudaRecorder:
    """A `Recorder` on CUDA. All recorders share one stream; all graphs of a recorder share a memory pool."""

    def __init__(self, *, check_sync: bool = False) -> None:
        """Create a recorder. `check_sync` is for third-party models, which may synchronize: this is detected before it
        breaks a capture.
        """
        self._check_sync = check_sync
        self._newest: torch.cuda.CUDAGraph | None = None
        """The latest graph, whose pool the next one shares. Torch (2.11) does not reuse a pool that all its graphs
        have left.
        """
        self._stream = _recording_stream(torch.cuda.current_device())

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Record `run` after one eager call, which compiles kernels and creates handles that a capture may not create.

        `torch.cuda.graph` is not used, because it frees all cached memory first, which the steps between captures would
        have to allocate again. Later work waits for the recording stream even if `run` raises, because what was
        launched reads memory that steps write to.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle() if self._newest is None else self._newest.pool()
        try:
            with torch.cuda.stream(self._stream):
                run()
                if self._check_sync:
                    _without_waiting(run)
                try:
                    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                    output = run()
                except BaseException:
                    with suppress(RuntimeError):  # the capture is already broken
                        self._end(graph, pool)
                    raise
                self._end(graph, pool)
        finally:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._newest = graph
        return graph.replay, output

    def _end(self, graph: torch.cuda.CUDAGraph, pool: tuple[int, int]) -> None:
        """End a capture. Raise RuntimeError if the device has invalidated it or cannot make a graph of it.

        Torch (2.11 to 2.13) leaves its allocator in capture mode if the capture was invalidated: memory that streams
        share is then never freed, and emptying the cache fails. This method therefore ends the allocator's capture,
        too. The pinned-memory allocator cannot be reset and takes no further capture into the pool (2.13), so later
        captures use another pool.
        """
        try:
            graph.capture_end()
        except RuntimeError:
            device = torch.cuda.current_device()
            with suppress(RuntimeError):  # the allocators have ended already
                torch._C._cuda_endAllocateToPool(device, pool)
                self._newest = None
                torch._C._cuda_releasePool(device, pool)
            raise


@cache
def _recording_stream(device: int) -> torch.cuda.Stream:
    """Return the stream of all recorders of a device, replaced weights included: cuBLAS keeps a workspace per stream
    forever.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _without_waiting(run: Callable[[], torch.Tensor]) -> None:
    """Call `run`. Raise RuntimeError if it makes the host wait for the device."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode(before)


def decode_buckets(slots: int) -> list[int]:
    """Return the bucket sizes for up to `slots` rows, the largest first."""
    sizes = {1, 2, 4, *range(8, _FINE + 1, 8), *range(_FINE, slots + 1, _COARSE)}
    return sorted({min(size, slots) for size in sizes} | {slots}, reverse=True)


@dataclass(frozen=True, eq=False)
class _Recorded:
    """Recorded work and the tensor of its result."""

    replay: Callable[[], None]
    output: torch.Tensor


@dataclass(frozen=True, eq=False)
class _Graph:
    """The graph of a bucket and the batch over fixed memory that it computes."""

    work: _Recorded
    batch: ForwardBatch


class _Variant(NamedTuple):
    """The properties of a step that need separate graphs."""

    adapted: bool = False
    """Rows may have adapters."""
    chained: bool = False
    """Rows may see each other's new tokens."""


class _GraphKey(NamedTuple):
    """The key of a graph."""

    rows: int
    """The bucket size."""
    variant: _Variant = _Variant()


_Sampling = tuple[_GraphKey, SamplingMode]
"""The key of a captured sampler, which samples all rows of a graph in one manner."""


class CudaGraphRunner:
    """A `Replays` of decodes that the tables have gathered. `capture_next` is called between steps."""

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        backends: Sequence[Callable[[], AttentionBackend]],
        recorder: Recorder,
        tables: SlotTables,
        sampler: Sampler,
        adapters: StepAdapters | None = None,
        *,
        decode_rows: int | None = None,
        chained_rows: int = 0,
    ) -> None:
        """Create a runner without graphs. `backends` create the attention backend of each cache group.

        Steps with one row per slot have at most `decode_rows` rows (default: the number of slots), others at most
        `chained_rows`. Raise ValueError if the tables do not keep decodes in fixed memory.
        """
        if tables.memory is None:
            raise ValueError("graphs read fixed memory: the tables need spare pages")
        self._model = model
        self._pool = pool
        self._backends = backends
        self._recorder = recorder
        self._tables = tables
        self._sampler = sampler
        self._memory = tables.memory
        self._adapters = adapters
        self._decode_rows = min(decode_rows or tables.memory.slots, tables.memory.slots)
        self._chained_rows = min(chained_rows, tables.memory.slots)
        self._pending: list[_GraphKey] = []
        self._graphs: dict[_GraphKey, _Graph] = {}
        self._recorded: dict[_Variant, list[int]] = {}  # bucket sizes in ascending order
        self._samplers: dict[_Sampling, _Recorded | None] = {}  # None if a capture failed for lack of memory
        self._requested: dict[_Sampling, None] = {}
        self._samples = True
        self._query_start = torch.arange(tables.memory.slots + 1, dtype=torch.int32, device=pool.device)
        self._request(_Variant())

    def replay(self, inputs: StepInputs, *, adapted: bool = False) -> torch.Tensor | None:
        """See `Replays`."""
        self._request(_Variant(adapted, inputs.chained))
        kind = self._graph_key(inputs, adapted)
        if kind is None:
            return None
        if adapted and self._adapters is not None:
            self._adapters.write_decode_rows(inputs.slots, kind.rows)
        graph = self._graphs[kind]
        padding = [1] * (kind.rows - len(inputs.slots))
        for given, attention, backend in zip(
            inputs.attention, graph.batch.attention, graph.batch.backends, strict=True
        ):
            backend.plan(replace(attention, host_kv_lens=given.host_kv_lens + padding))
        graph.work.replay()
        return graph.work.output[: len(inputs.slots)]

    def replay_sampling(self, inputs: StepInputs, *, adapted: bool = False) -> torch.Tensor | None:
        """See `Replays`. A missing capture is requested; it is made once every bucket is captured.

        The largest bucket's sampler is captured first: smaller ones reuse its memory.
        """
        kind = self._graph_key(inputs, adapted)
        if kind is None or not self._samples or len(inputs.sampling_rows) < len(inputs.slots):
            return None
        mode = self._sampler.mode(inputs.slots)
        if mode is None:
            return None
        if (kind, mode) not in self._samplers:
            largest = _GraphKey(self._recorded[kind.variant][-1], kind.variant)
            self._requested |= {(each, mode): None for each in (kind, largest) if (each, mode) not in self._samplers}
            return None
        work = self._samplers[kind, mode]
        if work is None:
            return None
        work.replay()
        return work.output[: len(inputs.slots)].clone()  # the next step may overwrite it before the copy to the host

    def capture_next(self) -> bool:
        """Capture the largest bucket that is missing, or a sampler. Return whether more is left to capture.

        Lack of memory is not an error: the step in question then runs eagerly.
        """
        if self._pending:
            self._capture(self._pending.pop(0))
        elif self._requested:
            wanted = max(self._requested, key=lambda wanted: wanted[0].rows)
            del self._requested[wanted]
            self._capture_sampling(*wanted)
        return bool(self._pending or self._requested)

    def _request(self, variant: _Variant) -> None:
        """Request all buckets of a sort, once."""
        if variant not in self._recorded:
            self._recorded[variant] = []
            most, least = (self._chained_rows, 2) if variant.chained else (self._decode_rows, 1)
            self._pending += [_GraphKey(rows, variant) for rows in decode_buckets(most) if rows >= least]

    def _graph_key(self, inputs: StepInputs, adapted: bool) -> _GraphKey | None:
        """Return the smallest captured bucket that holds a step, if any."""
        variant = _Variant(adapted, inputs.chained)
        recorded = self._recorded.get(variant, [])
        place = bisect_left(recorded, len(inputs.slots))
        return _GraphKey(recorded[place], variant) if inputs.in_fixed_buffers and place < len(recorded) else None

    @torch.inference_mode()
    def _capture(self, kind: _GraphKey) -> None:
        views = self._memory.first(kind.rows)
        batch = self._batch(kind, views)

        def run() -> torch.Tensor:
            ids = self._tables.ids_at(views.places)
            return self._model(ids, views.positions, replace(batch, input_ids=ids))

        try:
            work = self._record(run, f"{kind.rows} rows")
        except RuntimeError:
            logger.exception("CUDA graphs: capture failed, steps run eagerly")
            self._pending.clear()
            return
        if work is not None:
            self._graphs[kind] = _Graph(work, batch)
            insort(self._recorded[kind.variant], kind.rows)

    @torch.inference_mode()
    def _capture_sampling(self, kind: _GraphKey, mode: SamplingMode) -> None:
        views, hidden = self._memory.first(kind.rows), self._graphs[kind].work.output

        def run() -> torch.Tensor:
            tokens = self._sampler.sample_uniform(self._model.compute_logits(hidden), mode, views.output_positions)
            self._tables.write_sampled(views.sampled_places, tokens)
            return tokens

        try:
            self._samplers[kind, mode] = self._record(run, f"sampling for {kind.rows} rows")
        except RuntimeError:
            logger.exception("CUDA graphs: capture of sampling failed, sampling runs eagerly")
            self._samples = False
            self._requested.clear()

    def _record(self, run: Callable[[], torch.Tensor], what: str) -> _Recorded | None:
        """Record work; return None for lack of memory. Raise RuntimeError for failures that would repeat.

        The graph is also launched here, over padding, because its first launch allocates memory that no step should
        lack.
        """
        self._tables.clear_decodes()
        if self._adapters is not None:
            self._adapters.clear_decode_rows()
        with SuppressOom():
            recorded = _Recorded(*self._recorder.record(run))
            recorded.replay()
            return recorded
        logger.warning("CUDA graphs: out of memory, such steps run eagerly: graph=%r", what)
        release_cached()  # the pool keeps the memory of a failed capture, which the next, smaller one may need
        return None

    def _batch(self, kind: _GraphKey, views: DecodeInputViews) -> ForwardBatch:
        """Return a decode over the fixed memory, with backends of its own."""
        ones: Sequence[int] = [1] * kind.rows
        attention = [
            AttentionBatch(
                query_start=self._query_start[: kind.rows + 1],
                kv_lens=views.kv_lens,
                page_table=page_table,
                slot_mapping=slot_mapping,
                page_size=self._pool.page_size,
                host_query_lens=[*ones],
                host_kv_lens=[*ones],
            )
            for page_table, slot_mapping in zip(views.page_tables, views.slot_mappings, strict=True)
        ]
        return ForwardBatch.planned(
            input_ids=views.places[:0],  # read again at every step
            positions=views.positions,
            sample_index=views.places[:0],
            attention=attention,
            backends=[make() for make in self._backends],
            pool=self._pool,
            lora=self._adapters.decode_rows(kind.rows) if kind.variant.adapted and self._adapters is not None else None,
            chained=kind.variant.chained,
        )


def graph_runners(
    model: Model,
    pool: KVPool,
    backend: Callable[[], AttentionBackend],
    recorder: Recorder,
    *,
    decode_rows: int,
    chained_rows: int,
) -> Callable[[SlotTables, Sampler, StepAdapters | None], CudaGraphRunner] | None:
    """Return a factory of graph runners; None if the attention backend cannot be captured."""
    backends = [made for _ in pool.groups if (made := graph_backend(backend))]
    if not backends:
        return None
    return partial(CudaGraphRunner, model, pool, backends, recorder, decode_rows=decode_rows, chained_rows=chained_rows)
