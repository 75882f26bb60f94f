"""Decodes in which some have adapters: replayed from graphs of their own, on a recorder that plays back on the CPU."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import pytest
import torch

from packages.scheduler.tests.executor.graphs.graphed import SLOTS, LateReading, Tape, init
from tercet.kernels.attention.torch_native import TorchNativeAttention
from tercet.kernels.ops.lora import LoRAWeights
from tercet.protocol.messages.values import LoRAAdapter
from tercet.scheduler.core.places.loads import AdapterLoad
from tercet.scheduler.core.plan import PageUpdate, Plan, Row, StepResult
from tercet.scheduler.executor.forward_batch import ForwardBatch
from tercet.scheduler.executor.graphs.cuda_graphs import CudaGraphRunner
from tercet.scheduler.executor.kv_pool import KVPool
from tercet.scheduler.executor.lora.adapter_files import Adapter
from tercet.scheduler.executor.lora.adapters import StepAdapters
from tercet.scheduler.executor.model_runner import ModelRunner, Replays
from tercet.scheduler.models.layers.lora import LoRABank


class Bank:
    """Of adapters that are a number each, which is the last digit of their path."""

    def __init__(self, places: int) -> None:
        self.ranks = [0] * places
        self.weights = {"layer": LoRAWeights(torch.zeros(places, 1, 1), torch.zeros(places, 1, 1), (1,))}
        self.targets: Mapping[str, Any] = {}
        self.architecture = ""
        self.bytes = 8 * places

    def install(self, place: int, layers: object, rank: int) -> None:
        self.ranks[place] = 1
        self.weights["layer"].a[place] = float(rank)


class Adding:
    """A model that adds what a token's adapter is to its hidden state, and says it by the table alone."""

    def __init__(self, model: Any, bank: Bank) -> None:
        self.model = model
        self.numbers = bank.weights["layer"].a
        self.adapted: list[bool] = []
        self.sorted: list[bool] = []
        """Whether each step with adapters had its rows sorted by them."""

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        hidden: torch.Tensor = self.model(input_ids, positions, batch).clone()
        self.adapted.append(batch.lora is not None)
        if batch.lora is not None:
            order = torch.arange(len(hidden)) if batch.lora.order is None else batch.lora.order
            self.sorted.append(batch.lora.order is not None)
            for place, start, stop in batch.lora.table.tolist():
                hidden[order[start:stop]] += torch.sin(self.numbers[place] * torch.arange(hidden.shape[1]))
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model.compute_logits(hidden)
        return logits


Graphs = Callable[..., Replays]


def numbered(number: int) -> LoRAAdapter:
    return LoRAAdapter(f"/adapters/{number}", "0" * 64)


def run(attending: Any, pool: KVPool, graphs: Graphs | None) -> tuple[list[StepResult], Adding]:
    """Three choices: one with an adapter, one with none, one with another, which goes; a fourth takes its place.

    Beside graphs, other steps' tokens are sorted by adapter, too, as on a GPU.
    """
    bank = Bank(2)
    adapters = StepAdapters(cast("LoRABank", bank), SLOTS, torch.device("cpu"), sort=graphs is not None)
    adapters.loader._load = lambda adapter: Adapter("", int(adapter.path[-1]), {})
    model = Adding(attending, bank)
    runner = ModelRunner(
        model,
        pool,
        TorchNativeAttention,
        slots=SLOTS,
        context_length=23,
        vocab_size=50,
        device=torch.device("cpu"),
        adapters=adapters,
        graphs=None if graphs is None else partial(graphs, model),
    )
    plans = []
    with_place = [(0, [5, 9, 2, 44], 0), (1, [7], -1), (2, [30, 31, 32, 33], 1)]
    inits = [init(slot, ids, adapter=place) for slot, ids, place in with_place]
    pages = [PageUpdate(slot, 0, [[slot * 5 + page for page in range(5)]]) for slot in range(3)]
    rows = [Row(slot, 0, len(ids), sample=True) for slot, ids, _ in with_place]
    loads = [AdapterLoad(0, numbered(3)), AdapterLoad(1, numbered(5))]
    for step in range(15):
        plans.append(Plan(step=step, adapters=loads, introduce=inits, pages=pages, rows=rows))
        loads, inits, pages = [], [], []
        rows = [Row(row.slot, row.start + row.count, 1, sample=True) for row in rows]
        if step == 5:
            loads, inits = [AdapterLoad(1, numbered(8))], [init(2, [3, 4], adapter=1)]
            rows[2] = Row(2, 0, 2, sample=True)
        if step == 11:
            rows = rows[1:2]  # nobody left has an adapter
    results = []
    for plan in plans:
        output = runner.execute(plan)
        if runner.graphs is not None:
            runner.graphs.capture_next()
        results.append(output.result())
    adapters.close()
    return results, model


@pytest.mark.parametrize("buckets", [3, 20])
def test_a_runner_does_not_notice(buckets: int, attending: Any, steps: Any) -> None:
    plain, computed = run(attending, steps().pool, None)
    given, tape = steps(), Tape()

    def graphs(model: Adding, *tables: Any) -> Replays:
        made = CudaGraphRunner(model, given.pool, [LateReading], tape, *tables)
        for _ in range(buckets):
            made.capture_next()
        return made

    replayed, model = run(attending, given.pool, graphs)
    assert replayed == plain
    assert computed.adapted == [True] * 12 + [False] * 3
    assert all(model.sorted)
    assert not any(computed.sorted)
    assert tape.recorded[:6] == [4, 2, 1] * 2  # those without adapters first, and the others when one came
    assert tape.replays > 8
    assert sum(model.adapted) > sum(computed.adapted)  # recorded and played back, too
    tokens = [result.token_ids for result in plain]
    assert len({token for step in tokens for token in step}) > 5


def test_nobody_records_graphs_with_adapters_before_one_comes(attending: Any, steps: Any) -> None:
    given, tape = steps(), Tape()
    bank = Bank(1)
    adapters = StepAdapters(cast("LoRABank", bank), SLOTS, torch.device("cpu"))
    runner = ModelRunner(
        Adding(attending, bank),
        given.pool,
        TorchNativeAttention,
        slots=SLOTS,
        context_length=23,
        vocab_size=50,
        device=torch.device("cpu"),
        adapters=adapters,
        graphs=lambda *tables: CudaGraphRunner(Adding(attending, bank), given.pool, [LateReading], tape, *tables),
    )
    assert isinstance(runner.graphs, CudaGraphRunner)
    while runner.graphs.capture_next():
        pass
    assert tape.recorded == [4, 2, 1]
    adapters.close()
