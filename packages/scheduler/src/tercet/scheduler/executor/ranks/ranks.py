"""The `Executor` of a model that several processes of this machine share (tensor parallelism).

This process is rank 0, which receives the plans and passes them on to the other ranks. It starts them, and it ends if
one of them ends. Each rank is a `TpModelWorker` on its own GPU or cores.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from tercet.kernels.native.library import available_cores
from tercet.scheduler.async_loader import AsyncLoader
from tercet.scheduler.core.plan import Capacity, Plan, StepResult
from tercet.scheduler.device.cpu_threads import allowed_cores, bind_to_cores, core_share
from tercet.scheduler.device.devices import first_gpu, select_device, slow_dtype
from tercet.scheduler.executor.lora.adapters import AdapterLoader
from tercet.scheduler.executor.ranks.collectives import ProgressCollectives, collectives_of
from tercet.scheduler.executor.ranks.rank_messages import Forced, Prepare, RankStep
from tercet.scheduler.executor.ranks.worker_group import WorkerGroup
from tercet.scheduler.executor.ranks.worker_process import OnEnd
from tercet.scheduler.executor.sampling.slot_grammars import SlotGrammars
from tercet.scheduler.executor.tp_worker import PendingStep, TpModelWorker
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.grammar.cache import GrammarLoader
from tercet.scheduler.model_files import served_dtype
from tercet.scheduler.models.layers.shard import Shard
from tercet.scheduler.models.weights.weights import Progress
from tercet.scheduler.ports import Advance


class PendingRankStep:
    """A step that all ranks run. Tokens that grammars force after it are sent with the next order."""

    def __init__(self, step: PendingStep, plan: Plan, forced: list[Forced]) -> None:
        self._step = step
        self._plan: Plan | None = plan
        self._forced = forced

    def result(self) -> StepResult:
        """Wait for the step. Raise the error of its forward pass."""
        result = self._step.result()
        if self._plan is not None:
            self._forced += forced_tokens(self._plan, result)
            self._plan = None
        return result


class Ranks:
    """Rank 0 and its connections to the other ranks."""

    def __init__(
        self,
        options: WorkerOptions,
        size: int,
        progress: Progress | None = None,
        advance: Advance = lambda: None,
        on_end: OnEnd | None = None,
    ) -> None:
        """Start all ranks and bind this thread to its share of the cores; `on_end` is that of `WorkerGroup`.

        Raise ValueError for options that cannot work.
        """
        shares = shared_options(options, size)
        device = select_device(shares[0].device)
        allowed = allowed_cores() if device.type == "cpu" else []
        cores = [core_share(allowed, rank, size) for rank in range(size)]
        self._forced: list[Forced] = []
        self._workers = WorkerGroup(shares, cores, on_end)
        try:
            bind_to_cores(cores[0])
            collectives = collectives_of(0, size, self._workers.directory, device)
            if device.type == "cpu":
                collectives = ProgressCollectives(collectives, advance)
            self._worker = TpModelWorker(shares[0], progress, advance, Shard(0, size, collectives))
            self._workers.wait_for_all()
        except BaseException:
            self._workers.end()
            raise
        if device.type == "cpu":  # NCCL continues to read the rendezvous file
            self._workers.remove_directory()

    @property
    def capacity(self) -> Capacity:
        """Limits of the workers, fixed once all are built."""
        return self._worker.capacity

    @property
    def grammars(self) -> GrammarLoader | None:
        """The loader that compiles grammars before they are planned, on rank 0 only."""
        return self._worker.grammars

    @property
    def late_masks(self) -> SlotGrammars | None:
        """The source of choices whose late masks have become ready, on rank 0 only."""
        return self._worker.late_masks

    @property
    def adapters(self) -> AdapterLoader | None:
        """Rank 0's loader of adapters. Other ranks read adapters when a plan loads them."""
        return self._worker.adapters

    @property
    def audio(self) -> None:
        """Return None: several ranks take no audio."""
        return

    @property
    def images(self) -> None:
        """Return None: several ranks take no images."""
        return

    @property
    def weights(self) -> AsyncLoader[str, None]:
        """The loader that checks weights before all ranks load them."""
        return self._worker.weights

    @property
    def pids(self) -> list[int]:
        """Process ids of the other ranks."""
        return self._workers.pids

    def submit(self, plan: Plan) -> PendingRankStep:
        """Start a step in all ranks. Raise RankError if a rank cannot be reached."""
        self._workers.send(RankStep(plan=plan, forced=self._forced))
        self._forced.clear()
        return PendingRankStep(self._worker.submit(plan), plan, self._forced)

    def prepare(self) -> bool:
        """Capture the next graph in all ranks. See `Executor.prepare`."""
        if not self._worker.records:
            return False
        self._workers.send(Prepare())
        return self._worker.prepare()

    def close(self) -> None:
        """End the other ranks, then the worker: this also ends a running step whose result is no longer needed."""
        self._workers.end()
        self._worker.close()


def forced_tokens(plan: Plan, result: StepResult) -> list[Forced]:
    """Return the tokens that a step appended to slots after the sampled ones."""
    rows = ((plan.rows[index], tokens) for index, tokens in result.forced.items())
    return [Forced(row.slot, row.start + row.count + 1, tokens) for row, tokens in rows]


def shared_options(
    options: WorkerOptions, size: int, cores: Callable[[], int] = available_cores
) -> list[WorkerOptions]:
    """Return the options of each rank. Raise ValueError if there are too few GPUs.

    All ranks compute in the dtype that the first GPU would use alone, even if it is slow on another. On a CPU each rank
    uses the number of threads in the options, or its share of the cores. Only rank 0 compiles grammars, and only rank 0
    overlaps planning with execution.
    """
    first = first_gpu(options.device)
    if first is not None:
        if (count := torch.cuda.device_count()) < first + size:
            raise ValueError(f"{size} processes from GPU {first} on need as many GPUs: this machine has {count}")
        shares = [replace(options, device=f"cuda:{first + rank}") for rank in range(size)]
        dtype = served_dtype(options.model, options.dtype, slow=slow_dtype(torch.device(shares[0].device)))
        shares[1:] = [replace(share, dtype=dtype) for share in shares[1:]]
    else:
        threads = options.threads or max(1, cores() // size)
        shares = [replace(options, device="cpu", threads=threads)] * size
    return [shares[0], *(replace(share, grammar_backend="none", overlap=False) for share in shares[1:])]
