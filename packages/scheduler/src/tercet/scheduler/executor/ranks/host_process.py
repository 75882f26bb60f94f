"""Process of a host of higher rank: runs its share of a model's ranks for host 0, and nothing else.

It joins host 0, starts the ranks that host 0 gives it, passes orders on to them, and watches them. It computes nothing,
so that no collective delays its heartbeats. If host 0, another host or a rank is lost, it ends its ranks and joins
again, which takes as long as host 0 takes to start again.
"""

import logging
import os
import queue
import threading
import time
from dataclasses import replace

import msgspec

from tercet.protocol.errors import AddressError
from tercet.protocol.messages.full_inbox import FullSchedulerInbox
from tercet.protocol.messages.messages import Heartbeat, Ready
from tercet.protocol.messages.values import Phase, Role, Task
from tercet.protocol.node import ThreadNode
from tercet.scheduler.config import HostOptions, ModelOptions, ProcessOptions
from tercet.scheduler.device.cpu_threads import allowed_cores, core_share
from tercet.scheduler.executor.rank_strategy import RankError
from tercet.scheduler.executor.ranks.host_link import HostLink, LostError
from tercet.scheduler.executor.ranks.host_messages import Begin, Ended, Forward, Listening, Model, Unfit
from tercet.scheduler.executor.ranks.host_network import HostNetwork, HostsError, software
from tercet.scheduler.executor.ranks.shared_options import fingerprint_of, followed, host_options
from tercet.scheduler.executor.ranks.worker_group import WorkerGroup
from tercet.scheduler.executor.worker_options import WorkerOptions, decode_options
from tercet.scheduler.models.layers.shard import Split
from tercet.scheduler.resolved_model import ResolvedModel, resolve_served_model

logger = logging.getLogger(__name__)

_PAUSE = 0.5
"""Seconds between two sessions."""
_REPORT_INTERVAL = 10.0
"""Seconds between two log lines while host 0 is not reached."""


class HostProcess:
    """A host of higher rank. Its node tells a supervisor that it lives; frontends have no use for it."""

    def __init__(self, process: ProcessOptions, model: ModelOptions, hosts: HostOptions, network: HostNetwork) -> None:
        self._model = model
        self._host = hosts.node_rank
        self._network = network
        self._phase = Phase.LOADING
        self._served = False
        """Ranks have run here: host 0 is waited for without limit."""
        self._stopping = False
        self._waking: threading.Event = threading.Event()
        self._ended: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        config = process.node_config(Role.SCHEDULER)
        self._node = ThreadNode(config, FullSchedulerInbox, lambda _: Heartbeat(phase=self._phase))

    def run(self) -> None:
        """Run ranks until `stop`. Raise HostsError if host 0 is not reached in time, or refuses this host."""
        self._node.start()
        try:
            # which weights are read, and whether they are random, is host 0's to say
            found = resolve_served_model(replace(self._model, load_format="dummy"))
            if found.task is not Task.GENERATE:
                raise HostsError(f"--node-rank {self._host}: {found.name} generates no text, and runs on one host")
            began = reported = time.monotonic()
            logger.info("waiting for host 0: address=%s", self._network.address)
            while not self._stopping:
                try:
                    began = reported = self._run_session(found) or began
                except (LostError, AddressError) as error:
                    now = time.monotonic()
                    if not self._served and now - began > self._network.timeout:
                        raise HostsError(self._late()) from error
                    if now - reported > _REPORT_INTERVAL:
                        reported = now
                        logger.info("still waiting for host 0: address=%s %s", self._network.address, error)
                self._waking.wait(_PAUSE)
        finally:
            self._node.close("stopped" if self._stopping else "failed")

    def stop(self) -> None:
        """End the ranks and this process. Call it from a thread other than the one of `run`."""
        self._stopping = True
        self._waking.set()
        threading.Timer(_PAUSE, self._exit).start()

    def _exit(self) -> None:
        """End this process, whose ranks end with it: the model may be downloading in the main thread."""
        self._node.close("stopped")
        os._exit(0)

    def _late(self) -> str:
        network = self._network
        return (
            f"host 0 was not reached at {network.address} within {network.timeout:g} s: run `tercet serve MODEL "
            f"--nnodes N --node-rank 0 --dist-init-addr {network.address.removeprefix('tcp://')}` there, with the "
            f"same keys"
        )

    def _run_session(self, found: ResolvedModel) -> float:
        """Run ranks for one start of host 0. Return the time of its loss. Raise LostError if there were none."""
        link = HostLink(self._network, self._host)
        try:
            model = link.join()
            shares = self._fitting(link, model, found)
            logger.info("joined host 0, waiting for the other hosts: address=%s", self._network.address)
            begin = link.wait_for_begin(model)
            self._run_ranks(link, model, begin, shares)
        finally:
            link.close()
        return time.monotonic()

    def _fitting(self, link: HostLink, model: Model, found: ResolvedModel) -> list[WorkerOptions]:
        """Return the options of each rank here, with this host's files and devices.

        Raise HostsError for files that differ from host 0's, and for too few devices.
        """
        options = replace(decode_options(msgspec.Raw(model.options)), model=found.path, threads=self._model.threads)
        try:
            shares = host_options(options, model.device, self._model.device, model.count)
            if fingerprint_of(options) != model.fingerprint:
                raise HostsError(
                    f"{options.checkpoint} differs from the model of host 0: give all hosts the same files"
                )
        except (OSError, ValueError) as error:
            link.send(Unfit(session=link.session, reason=str(error)))
            raise HostsError(f"host 0 refuses this host: {error}") from error
        return [*map(followed, shares)]

    def _run_ranks(self, link: HostLink, model: Model, begin: Begin, shares: list[WorkerOptions]) -> None:
        """Run the ranks until one of them or host 0 is lost."""
        count, first = model.count, self._host * model.count
        split = Split(model.shards, model.stages)
        logger.info("starting ranks %d to %d of %d", first, first + count - 1, split.ranks)
        allowed = allowed_cores() if model.device == "cpu" else []
        group = WorkerGroup(
            shares,
            [core_share(allowed, rank, count) for rank in range(count)],
            lambda rank, _, reason: self._on_rank_end(link, rank, reason),
            first=first,
            split=split,
            store=begin.store,
            address=link.address,
        )
        try:
            self._relay(link, group)
        except LostError as lost:
            logger.warning("host 0 is lost, ending the ranks here: %s", lost)
        finally:
            group.end(kill=True)
            self._phase = Phase.LOADING
            while not self._ended.empty():
                self._ended.get()

    def _relay(self, link: HostLink, group: WorkerGroup) -> None:
        """Pass orders on to the ranks. Return when one of them ends; raise LostError with host 0."""
        listening = False
        while not self._stopping:
            for message, frame in link.receive(lambda: not self._ended.empty()):
                if isinstance(message, Forward):
                    try:
                        group.send(bytes(frame))
                    except RankError as error:
                        self._ended.put((-1, str(error)))
            if not self._ended.empty():
                rank, reason = self._ended.get()
                logger.error("rank %d of this model ended, leaving host 0: %s", rank, reason)
                link.send(Ended(session=link.session, rank=rank, reason=reason))
                return
            if not listening and group.all_listen():
                listening = True
                link.send(Listening(session=link.session))
                self._on_listening()

    def _on_listening(self) -> None:
        self._phase, self._served = Phase.IDLE, True
        self._node.set_ready(Ready(limits=None, identity=None, software=software()))

    def _on_rank_end(self, link: HostLink, rank: int, reason: str) -> None:
        """Pass the end of a rank from the thread that saw it to the thread of `run`."""
        self._ended.put((rank, reason))
        link.wake()
