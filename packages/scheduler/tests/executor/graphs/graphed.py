"""Slots of a step, graphs of them, and a recorder that plays these back on the CPU."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from tercet.kernels.attention.api import AttentionBackend, AttentionParams
from tercet.kernels.attention.torch_native import TorchNativeAttention
from tercet.kernels.ops.rope import rope_cache
from tercet.protocol.messages.values import SamplingParams, pack_ints
from tercet.scheduler.core.plan import PageUpdate, Row, SlotInit
from tercet.scheduler.executor.forward_batch import ForwardBatch
from tercet.scheduler.executor.graphs.cuda_graphs import CudaGraphRunner
from tercet.scheduler.executor.sampling.sampler import Sampler
from tercet.scheduler.executor.slot_tables import SlotTables
from tercet.scheduler.models.layers.layer_ops import LayerOps

SLOTS, LENGTH = 4, 24


class LateReading(TorchNativeAttention):
    """Reads lengths from the tensors when it attends, as a kernel in a graph does."""

    capturable = True
    bidirectional = False

    def attend(self, *given: Any, **options: Any) -> torch.Tensor:
        assert self._batch is not None
        self.plan(replace(self._batch, host_kv_lens=self._batch.kv_lens.tolist()))
        return super().attend(*given, **options)


class PlannedBefore(TorchNativeAttention):
    """Knows the lengths of a step only from its plan, as what plans on the host does."""

    capturable = True
    bidirectional = False


class Tape:
    """A `Recorder` that runs the work again, into the tensor of the first result."""

    def __init__(self, fails: int = 0, error: Exception | None = None, *, launched: bool = False) -> None:
        """`fails` rows cannot be recorded or, if so told, be launched when they are recorded."""
        self.fails = fails
        self.error = error or torch.OutOfMemoryError()
        self.launched = launched
        self.recorded: list[int] = []
        self.tried = 0
        self.launches = 0

    @property
    def replays(self) -> int:
        """Launches since those in which recording ended."""
        return self.launches - len(self.recorded)

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        self.tried += 1
        output = run()
        if len(output) == self.fails and not self.launched:
            raise self.error

        def replay() -> None:
            if len(output) == self.fails:
                self.recorded.remove(len(output))
                raise self.error
            self.launches += 1
            output.copy_(run())

        self.recorded.append(len(output))
        return replay, output


class Graphed:
    """Sequences of the fixture `steps` as slots of tables, and steps of them through graphs wherever there are some."""

    def __init__(
        self, model: Any, given: Any, tape: Tape, backend: Callable[[], AttentionBackend] = LateReading
    ) -> None:
        self.model, self.pool, self.backend = model, given.pool, backend()
        self.tables = SlotTables(
            SLOTS, LENGTH, page_size=4, groups=1, device=torch.device("cpu"), spare_pages=self.pool.spare_pages
        )
        for slot in range(SLOTS):
            tokens = [(7 * slot + 3 * place) % 50 for place in range(LENGTH)]
            self.tables.introduce(init(slot, tokens))
            self.tables.update_pages([PageUpdate(slot, 0, [given.tables[slot].tolist()])])
        sampler = Sampler(SLOTS, 50, torch.device("cpu"))
        self.runner = CudaGraphRunner(model, self.pool, [backend], tape, self.tables, sampler)

    def step(self, rows: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        """Of (slot, its new tokens, its tokens after the step)."""
        inputs = self.tables.gather([Row(slot, length - count, count, sample=True) for slot, count, length in rows])
        hidden = self.runner.replay(inputs)
        if hidden is not None:
            return hidden
        batch = ForwardBatch.planned(
            input_ids=self.tables.ids_at(inputs.places),
            positions=inputs.positions,
            sample_index=inputs.sample_index,
            attention=inputs.attention,
            backends=[self.backend],
            pool=self.pool,
            chained=inputs.chained,
        )
        hidden = self.model(batch.input_ids, batch.positions, batch)
        assert isinstance(hidden, torch.Tensor)
        return hidden


class Rotating:
    """A model of one layer, whose operations are given: they rotate what is new, and store it."""

    def __init__(self, ops: LayerOps) -> None:
        self.ops, self.params = ops, AttentionParams(scale=0.25)
        self.embedding = torch.randn(50, 4, 16, generator=torch.Generator().manual_seed(3))
        self.table = rope_cache(32, 16, 100.0)
        self.norms = torch.linspace(0.5, 1.5, 16), torch.linspace(1.5, 0.5, 16), 1e-6

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        q, k, v = torch.split(self.embedding[input_ids], [2, 1, 1], 1)
        heads = q, k, v
        return self.ops.attend(batch, 0, heads, positions, self.table, self.norms, self.params).flatten(1)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def init(slot: int, tokens: Sequence[int], top: int = -1, adapter: int = -1, **params: Any) -> SlotInit:
    return SlotInit(
        slot=slot,
        tokens=pack_ints(tokens),
        prompt_tokens=len(tokens),
        choice=0,
        sampling=SamplingParams(**{"max_new_tokens": 20, "seed": slot, **params}),
        top_logprobs=top,
        adapter=adapter,
    )
