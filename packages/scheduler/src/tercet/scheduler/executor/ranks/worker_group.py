"""The group of rank 0's worker processes: starts, commands, watches and ends them."""

import logging
import os
import shutil
import sys
import threading
from collections.abc import Sequence

from tercet.protocol.system.log_lines import settings_of_rank
from tercet.protocol.system.socket_directory import new_socket_directory
from tercet.scheduler.executor.ranks.rank_links import PlanSender, address_of
from tercet.scheduler.executor.ranks.rank_messages import Order
from tercet.scheduler.executor.ranks.worker_main import EXIT_CONFIG, Start
from tercet.scheduler.executor.ranks.worker_process import OnEnd, RankProcess, describe_end
from tercet.scheduler.executor.worker_options import WorkerOptions, encode_options

logger = logging.getLogger(__name__)

_CONFIG_GRACE = 10.0
"""Seconds for rank 0 to find invalid options itself, after another rank has."""


class WorkerGroup:
    """Ranks 1, 2, ... of as many ranks as there are options. `directory` is their rendezvous."""

    def __init__(
        self, options: Sequence[WorkerOptions], cores: Sequence[Sequence[int]], on_end: OnEnd | None = None
    ) -> None:
        """Start the processes. `options` and `cores` are of each rank, this process first.

        `on_end` is called if a rank ends unasked. By default this process ends, too, because its current step could
        never finish.
        """
        self.directory = new_socket_directory("tercet-ranks-")
        self._ending = threading.Event()
        self._processes: list[RankProcess] = []
        size = len(options)
        self._orders = PlanSender(address_of(self.directory, rank) for rank in range(1, size))
        try:
            for rank in range(1, size):
                start = Start(
                    rank=rank,
                    size=size,
                    directory=str(self.directory),
                    cores=[*cores[rank]],
                    log=settings_of_rank(rank),
                    options=encode_options(options[rank]),
                )
                self._processes.append(RankProcess(start, on_end or self._exit_with))
        except BaseException:
            self.end()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids in the order of ranks."""
        return [process.pid for process in self._processes]

    def wait_for_all(self) -> None:
        """Wait until all ranks listen for orders."""
        self._orders.wait_for_all()

    def send(self, order: Order) -> None:
        """Send an order to all ranks. Raise RankError."""
        self._orders.send(order)

    def remove_directory(self) -> None:
        """Remove the directory: all ranks are connected and do not need it any more."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def end(self) -> None:
        """End all ranks and wait for them. Further calls have no effect."""
        self._ending.set()
        for process in self._processes:
            process.release()
        for process in self._processes:
            process.join()
        self._processes.clear()
        self._orders.close()
        self.remove_directory()

    def _exit_with(self, rank: int, code: int, words: str) -> None:
        """End this process at once, because it may be in a collective that will never finish.

        If it is about to end because of invalid options, let it: its exit status then says that a restart is of no use.
        """
        if code == EXIT_CONFIG and self._ending.wait(_CONFIG_GRACE):
            return
        logger.error("rank %d of this model ended, shutting down the others: %s", rank, describe_end(code, words))
        sys.stderr.flush()
        self.remove_directory()
        os._exit(1)
