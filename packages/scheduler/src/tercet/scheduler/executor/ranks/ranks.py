"""`Ranks`: the `Executor` of a model that several processes of this machine share.

This one is rank 0, which is told the plans. It passes them on to its followers, which it starts and without which it
ends. Each of them is a `TpModelWorker` on a GPU, or on some cores, of its own.
"""

from dataclasses import replace

import torch

from tercet.kernels.native.library import available_cores
from tercet.scheduler.core.plan import Capacity, Plan, StepResult
from tercet.scheduler.device.cpu_threads import allowed_cores, bind_to, core_share
from tercet.scheduler.device.devices import first_gpu, slow_dtype, take_device
from tercet.scheduler.executor.lora.loader import AdapterLoader
from tercet.scheduler.executor.ranks.collectives import Telling, collectives_of
from tercet.scheduler.executor.ranks.rank_messages import Forced, Prepare, RankStep
from tercet.scheduler.executor.ranks.worker_group import WorkerGroup
from tercet.scheduler.executor.ranks.worker_process import OnEnd
from tercet.scheduler.executor.sampling.slot_grammars import SlotGrammars
from tercet.scheduler.executor.tp_worker import PendingStep, TpModelWorker
from tercet.scheduler.executor.weights_loader import WeightsLoader
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.grammar.loader import GrammarLoader
from tercet.scheduler.model_files import served_dtype
from tercet.scheduler.models.layers.shard import Shard
from tercet.scheduler.models.weights.weights import Progress
from tercet.scheduler.ports import Advance


class PendingShared:
    """A step that all ranks run. What grammars force after it is kept for the next order."""

    def __init__(self, step: PendingStep, plan: Plan, forced: list[Forced]) -> None:
        self._step = step
        self._plan: Plan | None = plan
        self._forced = forced

    def result(self) -> StepResult:
        """Wait for the step. Raises what the forward raised."""
        result = self._step.result()
        if self._plan is not None:
            self._forced += forced_by(self._plan, result)
            self._plan = None
        return result


class Ranks:
    """Rank 0, and the others."""

    def __init__(
        self,
        options: WorkerOptions,
        size: int,
        progress: Progress | None = None,
        advance: Advance = lambda: None,
        on_end: OnEnd | None = None,
    ) -> None:
        """Keeps this thread to its share of the cores; `on_end` is that of `WorkerGroup`.

        Raises ValueError for options that cannot work.
        """
        shares = shared_options(options, size)
        device = take_device(shares[0].device)
        allowed = allowed_cores() if device.type == "cpu" else []
        cores = [core_share(allowed, rank, size) for rank in range(size)]
        self._forced: list[Forced] = []
        self._followers = WorkerGroup(shares, cores, on_end)
        try:
            bind_to(cores[0])
            collectives = collectives_of(0, size, self._followers.directory, device)
            if device.type == "cpu":
                collectives = Telling(collectives, advance)
            self._worker = TpModelWorker(shares[0], progress, advance, Shard(0, size, collectives))
            self._followers.wait_for_all()
        except BaseException:
            self._followers.end()
            raise
        if device.type == "cpu":  # NCCL goes on to look at the file by which all met
            self._followers.forget_directory()

    @property
    def capacity(self) -> Capacity:
        """Fixed once all are built."""
        return self._worker.capacity

    @property
    def grammars(self) -> GrammarLoader | None:
        """Where grammars are read before they are planned: here alone."""
        return self._worker.grammars

    @property
    def late_masks(self) -> SlotGrammars | None:
        """Who tells when choices whose masks were late can go on: here alone."""
        return self._worker.late_masks

    @property
    def adapters(self) -> AdapterLoader | None:
        """Where adapters are read before they are planned. The others read theirs when they are told to."""
        return self._worker.adapters

    @property
    def weights(self) -> WeightsLoader:
        """Who looks at weights before all load them."""
        return self._worker.weights

    @property
    def pids(self) -> list[int]:
        """Process ids of the followers."""
        return self._followers.pids

    def submit(self, plan: Plan) -> PendingShared:
        """Start a step, everywhere. Raises RankError where it cannot be told."""
        self._followers.give(RankStep(plan=plan, forced=self._forced))
        self._forced.clear()
        return PendingShared(self._worker.submit(plan), plan, self._forced)

    def prepare(self) -> bool:
        """Record the next graph, everywhere. See `Executor.prepare`."""
        if not self._worker.records:
            return False
        self._followers.give(Prepare())
        return self._worker.prepare()

    def close(self) -> None:
        """End the followers first: a step that still runs, and whose result nobody takes, ends by that."""
        self._followers.end()
        self._worker.close()


def forced_by(plan: Plan, result: StepResult) -> list[Forced]:
    """What a step gave slots behind the tokens that it sampled."""
    rows = ((plan.rows[index], tokens) for index, tokens in result.forced.items())
    return [Forced(row.slot, row.start + row.count + 1, tokens) for row, tokens in rows]


def shared_options(options: WorkerOptions, size: int) -> list[WorkerOptions]:
    """Those of each rank. Raises ValueError where there are not as many GPUs.

    All compute in the dtype that the first GPU would take alone, whatever is slow on another. On a CPU each uses as
    many threads as are asked for, or its share of the cores. Rank 0 alone reads grammars, and alone has somebody who
    plans while it computes.
    """
    first = first_gpu(options.device)
    if first is not None:
        if (count := torch.cuda.device_count()) < first + size:
            raise ValueError(f"{size} processes from GPU {first} on need as many GPUs: this machine has {count}")
        shares = [replace(options, device=f"cuda:{first + rank}") for rank in range(size)]
        dtype = served_dtype(options.model, options.dtype, slow=slow_dtype(torch.device(shares[0].device)))
        shares[1:] = [replace(share, dtype=dtype) for share in shares[1:]]
    else:
        threads = options.threads or max(1, available_cores() // size)
        shares = [replace(options, device="cpu", threads=threads)] * size
    return [shares[0], *(replace(share, grammar_backend="none", overlap=False) for share in shares[1:])]
