"""Main program of a rank other than 0: `python -m tercet.scheduler.executor.ranks.worker_main`.

It holds a shard of rank 0's model. It samples as rank 0 does and takes rank 0's tokens, so it needs no grammars and
returns no results. It ends when its parent does, for any reason and at any point, because it cannot compute alone. The
parent is rank 0, or on another host the process that stands for rank 0 there. It ignores signals that stop a server,
because rank 0 may have requests to finish. A thread that no collective blocks sends heartbeats.
"""

import contextlib
import gc
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

import msgspec

from tercet.protocol.system.log_lines import LogSettings, start_logging
from tercet.scheduler.executor.ranks.liveness import INTERVAL
from tercet.scheduler.executor.ranks.rendezvous import Rendezvous

if TYPE_CHECKING:
    from tercet.scheduler.executor.ranks.rank_messages import Order
    from tercet.scheduler.executor.tp_worker import TpModelWorker

EXIT_CONFIG = 2
"""Exit status for options that cannot work, equal to the scheduler's."""
_JOIN_SECONDS = 0.5
"""Seconds to wait for the end of the parent to be noticed."""
LOADING, SERVING = b"l", b"s"
"""Heartbeats: bytes in a pipe."""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of a rank: one line of JSON on its standard input, whose other end closes when the parent ends."""

    rank: int
    shards: int
    """Ranks of each pipeline stage."""
    stages: int
    rendezvous: Rendezvous
    cores: list[int]
    """Cores to which the process is bound; empty for all."""
    log: LogSettings
    options: msgspec.Raw
    """`WorkerOptions`, still encoded: decoding needs torch, which is loaded after signals are handled."""


def main() -> None:
    """Run until the parent ends. The argument is the descriptor of the pipe for heartbeats."""
    heartbeats = _Heartbeats(int(sys.argv[1]))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with open(0, "rb", buffering=0, closefd=False) as lifeline:
        start = msgspec.json.decode(lifeline.readline(), type=Start)
    directory = start.rendezvous.directory
    end = threading.Thread(target=_end_with_parent, args=(directory,), name="lifeline", daemon=True)
    end.start()
    start_logging(start.log)
    try:
        run(start, heartbeats)
    except Exception:
        end.join(_JOIN_SECONDS)  # if all ranks end, a collective may fail before the end of the parent is noticed
        raise


class _Heartbeats:
    """Thread that writes heartbeats into a pipe, as long as this process runs."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self.state = LOADING
        threading.Thread(target=self._run, name="heartbeats", daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # the parent has ended
            while True:
                os.write(self._pipe, self.state)
                time.sleep(INTERVAL)


def run(start: Start, heartbeats: _Heartbeats) -> None:
    """Load the shard and execute orders. Raise errors of steps, or SystemExit for options that cannot work."""
    from tercet.protocol.system.process import gc_disabled_during_imports
    from tercet.scheduler.config import InsufficientMemoryError

    with gc_disabled_during_imports():
        from tercet.scheduler.executor.ranks.rank_links import PlanReceiver, address_of

        address = address_of(Path(start.rendezvous.directory), start.rank)
        orders = PlanReceiver(address)  # listen before orders are sent
    try:
        worker = build(start)
    except ValueError as error:
        sys.stderr.write(f"tercet-scheduler: {' '.join(str(error).split())}\n")
        sys.exit(1 if isinstance(error, InsufficientMemoryError) else EXIT_CONFIG)
    gc.freeze()
    heartbeats.state = SERVING
    follow(worker, orders.next, samples=start.rank < start.shards)


def build(start: Start) -> "TpModelWorker":
    """Return the worker of a shard. Raise ValueError for options that cannot work."""
    from tercet.scheduler.device.cpu_threads import bind_to_cores
    from tercet.scheduler.device.devices import select_device
    from tercet.scheduler.executor.ranks.collectives import shard_of
    from tercet.scheduler.executor.ranks.expert_exchange import with_exchange
    from tercet.scheduler.executor.tp_worker import TpModelWorker
    from tercet.scheduler.executor.worker_options import decode_options
    from tercet.scheduler.models.layers.shard import Split

    options = decode_options(start.options)
    bind_to_cores(start.cores)
    device = select_device(options.device)
    split = Split(start.shards, start.stages)
    shard = shard_of(start.rank, split, start.rendezvous, device)
    return TpModelWorker(options, shard=with_exchange(shard, options, start.rendezvous, device))


def follow(worker: "TpModelWorker", take: "Callable[[], Order]", *, samples: bool = True) -> None:
    """Execute orders until a step raises, which ends this process and rank 0 with it.

    A rank that does not sample, because its pipeline stage is not the last one, takes the tokens of rank 0.
    """
    from tercet.protocol.messages.values import unpack_ints
    from tercet.scheduler.executor.ranks.rank_messages import Prepare, RankStep, without_sampling

    while True:
        order = take()
        match order:
            case RankStep(plan=plan, forced=forced, sampled=sampled):
                for each in forced if samples else [*sampled, *forced]:
                    worker.force(each.slot, each.first, unpack_ints(each.tokens))
                worker.follow(plan if samples else without_sampling(plan))
            case Prepare():
                worker.prepare()
            case _:
                assert_never(order)


def _end_with_parent(directory: str) -> None:
    """End this process when standard input closes. The thread is independent of collectives and loads."""
    while os.read(0, 64):
        pass
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
