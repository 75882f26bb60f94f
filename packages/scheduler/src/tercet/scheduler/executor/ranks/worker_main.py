"""`python -m tercet.scheduler.executor.ranks.worker_main`: a process that holds a shard of rank 0's model.

It samples as rank 0 does and takes what rank 0 drew, so it needs no grammars, and nobody asks it for results. It ends
when rank 0 does, however that ends and whatever goes on here: there is nobody left to compute with. Signals that stop a
server are for rank 0, which may have requests to finish.
"""

import gc
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

import msgspec

if TYPE_CHECKING:
    from tercet.scheduler.executor.ranks.rank_messages import Order
    from tercet.scheduler.executor.tp_worker import TpModelWorker

EXIT_CONFIG = 2
"""Exit status for options that cannot work, as that of the scheduler."""
_MOMENT = 0.5
"""Seconds for the news of rank 0's end to arrive."""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What a follower must know: one line of JSON on its standard input, whose other end closes when rank 0 ends."""

    rank: int
    size: int
    directory: str
    """Where the processes meet."""
    cores: list[int]
    """Of the machine, that are for this process; none where it may run on any."""
    log_level: int
    options: msgspec.Raw
    """`WorkerOptions`: to know them takes torch, and signals have to be dealt with before that is loaded."""


def main() -> None:
    """Follow until rank 0 ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with open(0, "rb", buffering=0, closefd=False) as lifeline:
        start = msgspec.json.decode(lifeline.readline(), type=Start)
    end = threading.Thread(target=_end_with_rank_0, args=(start.directory,), name="lifeline", daemon=True)
    end.start()
    words = f"%(asctime)s %(levelname)s %(name)s [rank {start.rank}]: %(message)s"
    logging.basicConfig(level=start.log_level, format=words)
    try:
        run(start)
    except Exception:
        end.join(_MOMENT)  # where all end, a collective may have noticed first
        raise


def run(start: Start) -> None:
    """Load the shard, and follow. Raises what a step raises, or SystemExit for options that cannot work."""
    from tercet.protocol.system.process import gc_disabled_during_imports
    from tercet.scheduler.config import InsufficientMemoryError

    with gc_disabled_during_imports():
        from tercet.scheduler.executor.ranks.rank_links import PlanReceiver, address_of

        orders = PlanReceiver(address_of(Path(start.directory), start.rank))  # before rank 0 has any to give
    try:
        worker = build(start)
    except ValueError as error:
        sys.stderr.write(f"tercet-scheduler: {' '.join(str(error).split())}\n")
        sys.exit(1 if isinstance(error, InsufficientMemoryError) else EXIT_CONFIG)
    gc.freeze()
    follow(worker, orders.next)


def build(start: Start) -> "TpModelWorker":
    """The worker of a shard. Raises ValueError for options that cannot work."""
    from tercet.scheduler.device.cpu_threads import bind_to
    from tercet.scheduler.device.devices import take_device
    from tercet.scheduler.executor.ranks.collectives import collectives_of
    from tercet.scheduler.executor.tp_worker import TpModelWorker
    from tercet.scheduler.executor.worker_options import decode_options
    from tercet.scheduler.models.layers.shard import Shard

    options = decode_options(start.options)
    bind_to(start.cores)
    device = take_device(options.device)
    collectives = collectives_of(start.rank, start.size, Path(start.directory), device)
    return TpModelWorker(options, shard=Shard(start.rank, start.size, collectives))


def follow(worker: "TpModelWorker", take: "Callable[[], Order]") -> None:
    """Do what is ordered, for ever. Raises what a step raises: this process dies of it, and rank 0 with it."""
    from tercet.protocol.messages.values import unpack_ints
    from tercet.scheduler.executor.ranks.rank_messages import Prepare, RankStep

    while True:
        order = take()
        match order:
            case RankStep(plan=plan, forced=forced):
                for each in forced:
                    worker.force(each.slot, each.first, unpack_ints(each.tokens))
                worker.follow(plan)
            case Prepare():
                worker.prepare()
            case _:
                assert_never(order)


def _end_with_rank_0(directory: str) -> None:
    """In a thread, which neither a collective nor a load holds up."""
    while os.read(0, 64):
        pass
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
