"""The `Executor` of a model that several processes share (tensor parallelism), on this machine or on several hosts.

This process is rank 0, which receives the plans and passes them on to the other ranks. It starts those of this machine,
lets other hosts start theirs, and ends if one of them ends. Each rank is a `TpModelWorker` on its own GPU or cores.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tercet.protocol.messages.values import pack_ints
from tercet.scheduler.async_loader import AsyncLoader
from tercet.scheduler.core.plan import Capacity, Plan, StepResult
from tercet.scheduler.device.cpu_threads import allowed_cores, bind_to_cores, core_share
from tercet.scheduler.device.devices import select_device
from tercet.scheduler.executor.lora.adapters import AdapterLoader
from tercet.scheduler.executor.ranks.collectives import host_store, shard_of
from tercet.scheduler.executor.ranks.expert_exchange import with_exchange
from tercet.scheduler.executor.ranks.expert_loads import LoadFile
from tercet.scheduler.executor.ranks.host_network import HostNetwork
from tercet.scheduler.executor.ranks.hosts import Hosts
from tercet.scheduler.executor.ranks.rank_messages import Forced, Order, Prepare, RankStep, encode_order
from tercet.scheduler.executor.ranks.rendezvous import LOOPBACK
from tercet.scheduler.executor.ranks.shared_options import model_of, shared_options
from tercet.scheduler.executor.ranks.worker_group import WorkerGroup
from tercet.scheduler.executor.ranks.worker_process import OnEnd
from tercet.scheduler.executor.sampling.slot_grammars import SlotGrammars
from tercet.scheduler.executor.tp_worker import PendingStep, TpModelWorker
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.grammar.cache import GrammarLoader
from tercet.scheduler.models.layers.shard import Split
from tercet.scheduler.models.weights.weights import Progress
from tercet.scheduler.ports import Advance, ImageArrays

_REPORT_SECONDS = 1.0
"""Seconds in which the end of a rank is noticed, also on another host."""


class PendingRankStep:
    """A step that all ranks run. Tokens that grammars force after it are sent with the next order."""

    def __init__(
        self, step: PendingStep, plan: Plan, forced: list[Forced], sampled: list[Forced] | None = None
    ) -> None:
        """Create the step. Tokens for the next order are appended to `forced`, and to `sampled` if it is given."""
        self._step = step
        self._plan: Plan | None = plan
        self._forced = forced
        self._sampled = sampled

    def result(self) -> StepResult:
        """Wait for the step. Raise the error of its forward pass."""
        with lost_ranks_reported():
            result = self._step.result()
        if self._plan is not None:
            self._forced += forced_tokens(self._plan, result)
            if self._sampled is not None:
                self._sampled += sampled_tokens(self._plan, result)
            self._plan = None
        return result


class Ranks:
    """Rank 0 and its connections to the other ranks."""

    def __init__(
        self,
        options: WorkerOptions,
        split: Split,
        progress: Progress | None = None,
        advance: Advance = lambda: None,
        on_end: OnEnd | None = None,
        network: HostNetwork | None = None,
        load_file: Path | None = None,
    ) -> None:
        """Start all ranks and bind this thread to its share of the cores; `on_end` is that of `WorkerGroup`.

        With a `network`, wait for the other hosts, each of which runs as many ranks as this one. Raise ValueError for
        options that cannot work, and HostsError if the hosts do not meet. Loads of experts are written to `load_file`.
        """
        count = split.ranks if network is None else ranks_of_host(split.ranks, network.hosts)
        shares = shared_options(options, count)
        device = select_device(shares[0].device)
        allowed = allowed_cores() if device.type == "cpu" else []
        cores = [core_share(allowed, rank, count) for rank in range(count)]
        self._forced: list[Forced] = []
        self._sampled: list[Forced] | None = None if split.stages == 1 else []
        self._hosts = None if network is None else Hosts(network, model_of(shares[0], device, split), self._lose)
        address = LOOPBACK if self._hosts is None else self._hosts.address
        self._store = None if self._hosts is None else host_store(address, split.ranks)
        store = "" if self._store is None else f"{self._store.host}:{self._store.port}"
        self._workers = WorkerGroup(shares, cores, on_end, split=split, store=store, address=address)
        try:
            if self._hosts is not None:
                self._hosts.wait_for_joins()
                self._hosts.begin(store)
            bind_to_cores(cores[0])
            with lost_ranks_reported():
                shard = shard_of(0, split, self._workers.rendezvous, device, advance)
                shard = with_exchange(shard, options, self._workers.rendezvous, device)
                self._loads = None if load_file is None else LoadFile(load_file, shard.experts.loads)
                self._worker = TpModelWorker(shares[0], progress, advance, shard)
            self._workers.wait_for_all()
            if self._hosts is not None:
                self._hosts.wait_for_all()
        except BaseException:
            self._end_others()
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
        """Return None: a model that takes audio has one rank."""
        return

    @property
    def images(self) -> ImageArrays | None:
        """Rank 0's arrays of images. Other ranks get embeddings."""
        return self._worker.images

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
        self._send(RankStep(plan=plan, forced=self._forced, sampled=self._sampled or []))
        self._forced.clear()
        if self._loads is not None:
            self._loads.write_if_due()
        if self._sampled is not None:
            self._sampled.clear()
        return PendingRankStep(self._worker.submit(plan), plan, self._forced, self._sampled)

    def prepare(self) -> bool:
        """Capture the next graph in all ranks. See `Executor.prepare`."""
        if not self._worker.records:
            return False
        self._send(Prepare())
        return self._worker.prepare()

    def close(self) -> None:
        """End the other ranks, then the worker: this also ends a running step whose result is no longer needed."""
        self._end_others()
        self._worker.close()
        if self._loads is not None:
            self._loads.write()

    def _send(self, order: Order) -> None:
        frame = encode_order(order)
        self._workers.send(frame)
        if self._hosts is not None:
            self._hosts.send(frame)

    def _end_others(self) -> None:
        if self._hosts is not None:
            self._hosts.end()
        self._workers.end()

    def _lose(self, reason: str) -> None:
        """End this process, because a host is lost."""
        self._workers.exit(reason)


def sampled_tokens(plan: Plan, result: StepResult) -> list[Forced]:
    """Return the tokens that a step has sampled, as orders to append them."""
    pairs = zip(plan.rows, result.token_ids, strict=True)
    return [
        Forced(row.slot, row.start + row.count, pack_ints([token])) for row, token in pairs if row.sample and token >= 0
    ]


def ranks_of_host(size: int, hosts: int) -> int:
    """Return the number of ranks of each host. Raise ValueError if they cannot be equal."""
    if size % hosts or size < hosts:
        raise ValueError(f"{size} processes cannot be split evenly over --nnodes {hosts}")
    return size // hosts


@contextmanager
def lost_ranks_reported() -> Iterator[None]:
    """Delay an error of a collective until a thread has seen the end of the rank that may be its cause.

    That thread then ends this process, with the reason in the log.
    """
    try:
        yield
    except RuntimeError:
        time.sleep(_REPORT_SECONDS)
        raise


def forced_tokens(plan: Plan, result: StepResult) -> list[Forced]:
    """Return the tokens that a step appended to slots after the sampled ones."""
    rows = ((plan.rows[index], tokens) for index, tokens in result.forced.items())
    return [Forced(row.slot, row.start + row.count + 1, tokens) for row, tokens in rows]
