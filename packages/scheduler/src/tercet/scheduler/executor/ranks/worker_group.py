"""The group of worker processes on one host: starts, commands, watches and ends them."""

import logging
import os
import shutil
import sys
import threading
from collections.abc import Sequence

from tercet.protocol.system.log_lines import settings_of_rank
from tercet.protocol.system.socket_directory import new_socket_directory
from tercet.scheduler.executor.ranks.rank_links import PlanSender, address_of
from tercet.scheduler.executor.ranks.rendezvous import LOOPBACK, Rendezvous
from tercet.scheduler.executor.ranks.worker_main import EXIT_CONFIG, Start
from tercet.scheduler.executor.ranks.worker_process import OnEnd, RankProcess
from tercet.scheduler.executor.worker_options import WorkerOptions, encode_options
from tercet.scheduler.models.layers.shard import Split

logger = logging.getLogger(__name__)

_CONFIG_GRACE = 10.0
"""Seconds for rank 0 to find invalid options itself, after another rank has."""


class WorkerGroup:
    """The ranks of one host, beside this process: all except rank 0, which this process is on the first host.

    `rendezvous` is where they meet the other ranks.
    """

    def __init__(
        self,
        options: Sequence[WorkerOptions],
        cores: Sequence[Sequence[int]],
        on_end: OnEnd | None = None,
        *,
        first: int = 0,
        split: Split | None = None,
        store: str = "",
        address: str = LOOPBACK,
    ) -> None:
        """Start the processes. `options` and `cores` are of each rank of this host, of which `first` is the number.

        `split` is that of the ranks on all hosts; `store` and `address` are those of `Rendezvous`. `on_end` is called
        if a rank ends unasked. By default this process ends, too, because its current step could never finish.
        """
        self.directory = new_socket_directory("tercet-ranks-")
        self.rendezvous = Rendezvous(directory=str(self.directory), store=store, address=address)
        self._ending = threading.Event()
        self._processes: list[RankProcess] = []
        split = split or Split(len(options))
        started = [rank for rank in range(first, first + len(options)) if rank]
        self._orders = PlanSender(address_of(self.directory, rank) for rank in started)
        try:
            for rank in started:
                start = Start(
                    rank=rank,
                    shards=split.shards,
                    stages=split.stages,
                    rendezvous=self.rendezvous,
                    cores=[*cores[rank - first]],
                    log=settings_of_rank(rank),
                    options=encode_options(options[rank - first]),
                )
                self._processes.append(RankProcess(start, on_end or self._exit_with))
        except BaseException:
            self.end()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids in the order of ranks."""
        return [process.pid for process in self._processes]

    def all_listen(self) -> bool:
        """Return whether all ranks listen for orders."""
        return self._orders.all_listen()

    def wait_for_all(self) -> None:
        """Wait until all ranks listen for orders."""
        self._orders.wait_for_all()

    def send(self, frame: bytes) -> None:
        """Send an encoded order to all ranks. Raise RankError."""
        self._orders.send(frame)

    def remove_directory(self) -> None:
        """Remove the directory: all ranks are connected and do not need it any more."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def end(self, *, kill: bool = False) -> None:
        """End all ranks and wait for them; with `kill`, at once. Further calls have no effect."""
        self._ending.set()
        for process in self._processes:
            if kill:
                process.kill()
            process.release()
        for process in self._processes:
            process.join()
        self._processes.clear()
        self._orders.close()
        self.remove_directory()

    def exit(self, reason: str) -> None:
        """End this process and all ranks at once: this process may be in a collective that will never finish."""
        logger.error("%s", reason)
        sys.stderr.flush()
        for process in self._processes:  # one that is stopped would not notice that this process ends
            process.kill()
        self.remove_directory()
        os._exit(1)

    def _exit_with(self, rank: int, code: int, reason: str) -> None:
        """End this process because a rank ended.

        If it is about to end because of invalid options, let it: its exit status then says that a restart is of no use.
        """
        if code == EXIT_CONFIG and self._ending.wait(_CONFIG_GRACE):
            return
        self.exit(f"rank {rank} of this model ended, shutting down the others: {reason}")
