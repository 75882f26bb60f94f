"""`CudaGraphRunner`: decode steps replayed as CUDA graphs, so that a GPU never waits for Python to launch kernels.

A graph reads fixed memory (`DecodeInputBuffers`), into which every decode is written, and has a fixed number of rows,
its *bucket*: a step is replayed by the smallest that holds it, padding behind its rows. What is no decode, or fits no
bucket, runs as it is. Graphs are recorded one at a time between steps, so that start-up does not wait for them, and the
largest first: the others find room in the memory that it was given.

Steps in which somebody has an adapter have graphs of their own, which are recorded once there is such a step. In these
each row is a run of `LoRARows`, empty where it has no adapter. So have steps in which slots have several rows, one
after another: there new tokens are stored by a kernel of their own, before attention.

What follows the hidden states, up to the tokens in their slots, is recorded too, once a step has wanted it: for each
bucket, and for each manner in which all rows of a step are sampled. Rows of several manners are sampled as they are.

A graph has attention backends of its own. They are told of every step that it replays, for some plan on the host what
the recorded kernels then read.
"""

import logging
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple, Protocol

import torch

from tercet.kernels.attention.api import AttentionBackend, AttentionBatch
from tercet.scheduler.device.oom import SuppressOom, release_cached
from tercet.scheduler.executor.forward_batch import ForwardBatch
from tercet.scheduler.executor.graph_inputs import DecodeInputViews
from tercet.scheduler.executor.kv_pool import KVPool
from tercet.scheduler.executor.lora.adapters import StepAdapters
from tercet.scheduler.executor.model_runner import Model
from tercet.scheduler.executor.sampling.sampler import Sampler
from tercet.scheduler.executor.sampling.slot_params import Manner
from tercet.scheduler.executor.slot_tables import SlotTables, StepInputs

logger = logging.getLogger(__name__)

_FINE, _COARSE = 64, 16
"""Buckets are 1, 2, 4, then multiples of 8 up to the first, and then multiples of the second."""


class Recorder(Protocol):
    """How a device records work."""

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Record `run`: (what does it again, the tensor that then holds its result)."""
        ...


class CudaRecorder:
    """Records on a stream of its own, the same for all recorders; all graphs of one share a memory pool."""

    def __init__(self, *, wary: bool = False) -> None:
        """`wary` is for models of others, which may wait for the device: that is found out before it breaks off."""
        self._wary = wary
        self._newest: torch.cuda.CUDAGraph | None = None
        """Whose pool the next one shares. Torch takes none into a pool again that all others have left (in 2.11)."""
        self._stream = _recording_stream(torch.cuda.current_device())

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Runs it once before, which compiles kernels and makes the handles that recording may not.

        Not by `torch.cuda.graph`, which gives back all free memory first: the steps between would have to get it again.
        Also where it raises, what comes next waits for what was launched, which reads memory that steps write into.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle() if self._newest is None else self._newest.pool()
        try:
            with torch.cuda.stream(self._stream):
                run()
                if self._wary:
                    _without_waiting(run)
                try:
                    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                    output = run()
                except BaseException:
                    with suppress(RuntimeError):  # which would only say that it was broken off
                        self._end(graph, pool)
                    raise
                self._end(graph, pool)
        finally:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._newest = graph
        return graph.replay, output

    def _end(self, graph: torch.cuda.CUDAGraph, pool: tuple[int, int]) -> None:
        """End a recording. Raises RuntimeError where the device has broken it off, or cannot make a graph of it.

        Torch (2.11 to 2.13) has its allocator go on recording for ever if it was broken off: memory that streams share
        is then never free again, and to give back what is free fails. So that is ended here, too. That of pinned memory
        cannot be ended, and takes no further recording into the pool (in 2.13): those that follow have another.
        """
        try:
            graph.capture_end()
        except RuntimeError:
            device = torch.cuda.current_device()
            with suppress(RuntimeError):  # the allocators had ended
                torch._C._cuda_endAllocateToPool(device, pool)
                self._newest = None
                torch._C._cuda_releasePool(device, pool)
            raise


@cache
def _recording_stream(device: int) -> torch.cuda.Stream:
    """One for all recorders of a device, also of weights that come later: cuBLAS gives each stream memory, for good."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _without_waiting(run: Callable[[], torch.Tensor]) -> None:
    """Raises RuntimeError where it makes the host wait for the device."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode(before)


def decode_buckets(slots: int) -> list[int]:
    """Sizes of graphs for up to `slots` rows, the largest first."""
    sizes = {1, 2, 4, *range(8, _FINE + 1, 8), *range(_FINE, slots + 1, _COARSE)}
    return sorted({min(size, slots) for size in sizes} | {slots}, reverse=True)


@dataclass(frozen=True, eq=False)
class _Recorded:
    """Recorded work, and the tensor of its result."""

    replay: Callable[[], None]
    output: torch.Tensor


@dataclass(frozen=True, eq=False)
class _Graph:
    """The work of a bucket, and the batch over fixed memory that it computes."""

    work: _Recorded
    batch: ForwardBatch


class _Sort(NamedTuple):
    """What steps have graphs of their own for."""

    adapted: bool = False
    """Whether rows may have adapters."""
    chained: bool = False
    """Whether rows may see each other's new tokens."""


class _Kind(NamedTuple):
    """Which steps a graph computes."""

    rows: int
    """The bucket."""
    sort: _Sort = _Sort()


_Sampling = tuple[_Kind, Manner]
"""What samples for all rows of a graph in one manner."""


class CudaGraphRunner:
    """Replays decodes that the tables have gathered. `capture_next` is called between steps."""

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
        """`backends` make those of each cache group.

        Steps in which each slot has one row have `decode_rows` at the most, or as many as there are slots, and others
        `chained_rows`. Raises ValueError for tables whose decodes lie anywhere.
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
        self._waiting: list[_Kind] = []
        self._graphs: dict[_Kind, _Graph] = {}
        self._recorded: dict[_Sort, list[int]] = {}  # buckets in order
        self._samplings: dict[_Sampling, _Recorded | None] = {}  # None where there is none, nor will be
        self._wanted: dict[_Sampling, None] = {}
        self._samples = True
        self._query_start = torch.arange(tables.memory.slots + 1, dtype=torch.int32, device=pool.device)
        self._want(_Sort())

    def replay(self, inputs: StepInputs, *, adapted: bool = False) -> torch.Tensor | None:
        """See `Replays`."""
        self._want(_Sort(adapted, inputs.chained))
        kind = self._kind(inputs, adapted)
        if kind is None:
            return None
        if adapted and self._adapters is not None:
            self._adapters.put_in_place(inputs.slots)
        graph = self._graphs[kind]
        padding = [1] * (kind.rows - len(inputs.slots))
        for given, attention, backend in zip(
            inputs.attention, graph.batch.attention, graph.batch.backends, strict=True
        ):
            backend.plan(replace(attention, host_kv_lens=given.host_kv_lens + padding))
        graph.work.replay()
        return graph.work.output[: len(inputs.slots)]

    def replay_sampling(self, inputs: StepInputs, *, adapted: bool = False) -> torch.Tensor | None:
        """See `Replays`. What is wanted and not recorded is recorded next, once every bucket is.

        That of the largest bucket comes first: what it takes is room for the others.
        """
        kind = self._kind(inputs, adapted)
        if kind is None or not self._samples or len(inputs.sampling_rows) < len(inputs.slots):
            return None
        manner = self._sampler.manner(inputs.slots)
        if manner is None:
            return None
        if (kind, manner) not in self._samplings:
            largest = _Kind(self._recorded[kind.sort][-1], kind.sort)
            self._wanted |= {(each, manner): None for each in (kind, largest) if (each, manner) not in self._samplings}
            return None
        work = self._samplings[kind, manner]
        if work is None:
            return None
        work.replay()
        return work.output[: len(inputs.slots)].clone()  # the next step's may be written before it has left

    def capture_next(self) -> bool:
        """Record the largest bucket that is not recorded yet, or a sampling; False when there is none to record.

        No memory ends it.
        """
        if self._waiting:
            self._capture(self._waiting.pop(0))
        elif self._wanted:
            wanted = max(self._wanted, key=lambda wanted: wanted[0].rows)
            del self._wanted[wanted]
            self._capture_sampling(*wanted)
        return bool(self._waiting or self._wanted)

    def _want(self, sort: _Sort) -> None:
        """Let all buckets of a sort be recorded, unless that has been asked for."""
        if sort not in self._recorded:
            self._recorded[sort] = []
            most, least = (self._chained_rows, 2) if sort.chained else (self._decode_rows, 1)
            self._waiting += [_Kind(rows, sort) for rows in decode_buckets(most) if rows >= least]

    def _kind(self, inputs: StepInputs, adapted: bool) -> _Kind | None:
        """The smallest that holds a step; None if there is none."""
        sort = _Sort(adapted, inputs.chained)
        recorded = self._recorded.get(sort, [])
        place = bisect_left(recorded, len(inputs.slots))
        return _Kind(recorded[place], sort) if inputs.in_place and place < len(recorded) else None

    @torch.inference_mode()
    def _capture(self, kind: _Kind) -> None:
        views = self._memory.first(kind.rows)
        batch = self._batch(kind, views)

        def run() -> torch.Tensor:
            ids = self._tables.ids_at(views.places)
            return self._model(ids, views.positions, replace(batch, input_ids=ids))

        try:
            work = self._record(run, f"{kind.rows} rows")
        except RuntimeError:
            logger.exception("steps cannot be recorded here: they are launched kernel by kernel")
            self._waiting.clear()
            return
        if work is not None:
            self._graphs[kind] = _Graph(work, batch)
            insort(self._recorded[kind.sort], kind.rows)

    @torch.inference_mode()
    def _capture_sampling(self, kind: _Kind, manner: Manner) -> None:
        views, hidden = self._memory.first(kind.rows), self._graphs[kind].work.output

        def run() -> torch.Tensor:
            tokens = self._sampler.sample_alike(self._model.compute_logits(hidden), manner, views.output_positions)
            self._tables.write_sampled(views.sampled_places, tokens)
            return tokens

        try:
            self._samplings[kind, manner] = self._record(run, f"sampling for {kind.rows} rows")
        except RuntimeError:
            logger.exception("sampling cannot be recorded here: it is launched kernel by kernel")
            self._samples = False
            self._wanted.clear()

    def _record(self, run: Callable[[], torch.Tensor], what: str) -> _Recorded | None:
        """None where there is no memory. Raises RuntimeError where something else fails, and would again.

        It is launched here, over padding: the first launch of a graph wants memory, too, and no step is to lack it.
        """
        self._tables.clear_decodes()
        if self._adapters is not None:
            self._adapters.clear_in_place()
        with SuppressOom():
            recorded = _Recorded(*self._recorder.record(run))
            recorded.replay()
            return recorded
        logger.warning("no memory for a graph of %s: such steps are launched kernel by kernel", what)
        release_cached()  # what a recording was given stays its pool's: the next, which is smaller, may need that
        return None

    def _batch(self, kind: _Kind, views: DecodeInputViews) -> ForwardBatch:
        """A decode over the fixed memory, with backends of its own."""
        ones: Sequence[int] = [1] * kind.rows
        attention = [
            AttentionBatch(
                query_start=self._query_start[: kind.rows + 1],
                kv_lens=views.kv_lens,
                page_table=page_table,
                slot_mapping=slot_mapping,
                page_size=self._pool.shape.page_size,
                host_query_lens=[*ones],
                host_kv_lens=[*ones],
            )
            for page_table, slot_mapping in zip(views.page_tables, views.slot_mappings, strict=True)
        ]
        return ForwardBatch.planned(
            input_ids=views.places[:0],  # read anew at every step
            positions=views.positions,
            sample_index=views.places[:0],
            attention=attention,
            backends=[make() for make in self._backends],
            pool=self._pool,
            lora=self._adapters.in_place(kind.rows) if kind.sort.adapted and self._adapters is not None else None,
            chained=kind.sort.chained,
        )
