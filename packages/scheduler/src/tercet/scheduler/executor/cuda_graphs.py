"""`CudaGraphRunner`: decode steps replayed as CUDA graphs, so that a GPU never waits for Python to launch kernels.

A graph reads and writes fixed memory, and has a fixed number of rows, its *bucket*. A step is copied into that memory
and padded to the next bucket: padded rows are decodes of one token whose key and value go to the pool's spare page, so
they harm nobody. What is no decode, or fits no bucket, runs as it is. Graphs are recorded one at a time between steps,
so that start-up does not wait for them, and the largest first: the others find room in the memory that it was given.

A graph has attention backends of its own. They are told of every step that it replays, for some plan on the host what
the recorded kernels then read.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from tercet.kernels.attention.api import AttentionBackend, AttentionBatch
from tercet.scheduler.executor.forward_batch import ForwardBatch, ForwardMode
from tercet.scheduler.executor.kv_pool import KVPool
from tercet.scheduler.executor.model_runner import Model
from tercet.scheduler.executor.shortage import lacks_memory

logger = logging.getLogger(__name__)

_FINE, _COARSE = 64, 16
"""Buckets are 1, 2, 4, then multiples of 8 up to the first, and then multiples of the second."""


class Recorder(Protocol):
    """How a device records work."""

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Record `run`: (what does it again, the tensor that then holds its result)."""
        ...


class CudaRecorder:
    """Records on a stream of its own; all graphs share one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Runs it once before, which compiles kernels and makes the handles that recording may not.

        Not by `torch.cuda.graph`, which gives back all free memory first: the steps between would have to get it again.
        Also where it raises, what comes next waits for what was launched, which reads memory that steps write into.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                run()
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    output = run()
                finally:
                    graph.capture_end()
        finally:
            torch.cuda.current_stream().wait_stream(self._stream)
        return graph.replay, output


def decode_buckets(slots: int) -> list[int]:
    """Sizes of graphs for up to `slots` rows, the largest first."""
    sizes = {1, 2, 4, *range(8, _FINE + 1, 8), *range(_FINE, slots + 1, _COARSE)}
    return sorted({min(size, slots) for size in sizes} | {slots}, reverse=True)


@dataclass(frozen=True, eq=False)
class _GroupInputs:
    """The memory that graphs read of one cache group, for the most rows."""

    kv_lens: torch.Tensor  # int32 [rows]
    page_table: torch.Tensor  # int32 [rows, pages]
    slot_mapping: torch.Tensor  # int64 [rows]
    spare_page: int
    page_size: int

    def fill(self, given: AttentionBatch, rows: int, bucket: int) -> None:
        """The rows of a step, then padding."""
        self.kv_lens[:rows].copy_(given.kv_lens)
        self.page_table[:rows, : given.page_table.shape[1]].copy_(given.page_table)
        self.slot_mapping[:rows].copy_(given.slot_mapping)
        if rows == bucket:
            return
        self.kv_lens[rows:bucket].fill_(1)
        self.page_table[rows:bucket, 0].fill_(self.spare_page)
        self.slot_mapping[rows:bucket].fill_(self.spare_page * self.page_size)


@dataclass(frozen=True, eq=False)
class _Graph:
    """The recorded work of a bucket, the tensor of its result, and the batch over fixed memory that it computes."""

    replay: Callable[[], None]
    output: torch.Tensor
    batch: ForwardBatch


class CudaGraphRunner:
    """A `Model` that replays decode steps where it can. `capture_next` is called between steps."""

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        backends: Sequence[Callable[[], AttentionBackend]],
        recorder: Recorder,
        *,
        slots: int,
        context_length: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._pool = pool
        self._backends = backends  # of each cache group
        self._recorder = recorder
        self._waiting = decode_buckets(slots)
        self._graphs: dict[int, _Graph] = {}
        self._ids = torch.zeros(slots, dtype=torch.int64, device=device)
        self._positions = torch.zeros(slots, dtype=torch.int64, device=device)
        self._query_start = torch.arange(slots + 1, dtype=torch.int32, device=device)
        size = pool.shape.page_size
        width = -(-(context_length + 1) // size)
        self._groups = [
            _GroupInputs(
                kv_lens=torch.ones(slots, dtype=torch.int32, device=device),
                page_table=torch.full((slots, width), group.pages, dtype=torch.int32, device=device),
                slot_mapping=torch.full((slots,), group.pages * size, dtype=torch.int64, device=device),
                spare_page=group.pages,
                page_size=size,
            )
            for group in pool.groups
        ]

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """See `Model`. The result is good until the next call."""
        rows = len(input_ids)
        bucket = min((size for size in self._graphs if size >= rows), default=0)
        if batch.mode is not ForwardMode.DECODE or not bucket:
            return self._model(input_ids, positions, batch)
        self._ids[:rows].copy_(input_ids)
        self._positions[:rows].copy_(positions)
        if rows < bucket:
            self._ids[rows:bucket].zero_()
            self._positions[rows:bucket].zero_()
        graph = self._graphs[bucket]
        fixed = zip(self._groups, graph.batch.backends, graph.batch.attention, strict=True)
        for given, (group, backend, attention) in zip(batch.attention, fixed, strict=True):
            group.fill(given, rows, bucket)
            backend.plan(replace(attention, host_kv_lens=[*given.host_kv_lens, *[1] * (bucket - rows)]))
        graph.replay()
        return graph.output[:rows]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model`."""
        return self._model.compute_logits(hidden)

    @torch.inference_mode()
    def capture_next(self) -> bool:
        """Record the largest bucket that is not recorded yet; False when there is none. No memory ends it."""
        if not self._waiting:
            return False
        bucket = self._waiting.pop(0)
        for group in self._groups:
            group.kv_lens.fill_(1)  # what the last step left there may name pages that are now another's
            group.page_table[:, 0].fill_(group.spare_page)
            group.slot_mapping.fill_(group.spare_page * group.page_size)
        batch = self._batch(bucket)
        ids, positions = self._ids[:bucket].zero_(), self._positions[:bucket].zero_()
        try:
            self._graphs[bucket] = _Graph(*self._recorder.record(lambda: self._model(ids, positions, batch)), batch)
        except (MemoryError, RuntimeError) as error:
            if lacks_memory(error):
                logger.warning("no memory for a graph of %d rows: such steps are launched kernel by kernel", bucket)
            else:
                logger.exception("steps cannot be recorded here: they are launched kernel by kernel")
                self._waiting.clear()
        return bool(self._waiting)

    def _batch(self, bucket: int) -> ForwardBatch:
        """A decode of `bucket` rows over the fixed memory, with backends of its own."""
        ones: Sequence[int] = [1] * bucket
        attention = [
            AttentionBatch(
                query_start=self._query_start[: bucket + 1],
                kv_lens=group.kv_lens[:bucket],
                page_table=group.page_table[:bucket],
                slot_mapping=group.slot_mapping[:bucket],
                page_size=group.page_size,
                host_query_lens=[*ones],
                host_kv_lens=[*ones],
            )
            for group in self._groups
        ]
        return ForwardBatch.planned(
            input_ids=self._ids[:bucket],
            positions=self._positions[:bucket],
            sample_index=self._positions[:0],
            attention=attention,
            backends=[make() for make in self._backends],
            pool=self._pool,
        )
