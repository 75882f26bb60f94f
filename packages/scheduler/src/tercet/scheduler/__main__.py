"""Command line of one scheduler process: `tercet-scheduler`, or `python -m tercet.scheduler`."""

import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, CycloptsError, Parameter

from tercet.protocol.system.streams import part_streams
from tercet.scheduler.__about__ import __version__
from tercet.scheduler.config import (
    ConfigError,
    ExpertOptions,
    HostOptions,
    InsufficientMemoryError,
    ModelOptions,
    ProcessOptions,
    ScheduleOptions,
)

if TYPE_CHECKING:
    from tercet.scheduler.executor.ranks.host_network import HostNetwork

EXIT_SHORTAGE = 1
"""Exit status if memory or a GPU is not available now: a restart may help."""
EXIT_CONFIG = 2
"""Exit status for options that cannot work: a restart would not help."""
_INTERRUPTED = 130

app = App(name="tercet-scheduler", version=__version__, help="Schedule and execute one model.")


@app.default
def serve(
    process: ProcessOptions = ProcessOptions(),
    model: ModelOptions = ModelOptions(),
    schedule: ScheduleOptions = ScheduleOptions(),
    hosts: HostOptions = HostOptions(),
    experts: ExpertOptions = ExpertOptions(),
) -> None:
    """Load a model and serve it to frontends until told to stop; with --node-rank, run a share of it for host 0."""
    process.start_logging()
    from tercet.protocol.system.process import exit_with_parent, gc_disabled_during_imports, on_signals

    with gc_disabled_during_imports():
        from tercet.protocol.errors import AddressError, ChannelError, KeysError
        from tercet.protocol.system.file_limit import raise_file_limit
        from tercet.scheduler.executor.ranks.host_network import HostNetwork
        from tercet.scheduler.model_files import ModelError
        from tercet.scheduler.wiring import SchedulerProcess

    try:
        raise_file_limit()
        if (network := HostNetwork.of(process, hosts)) is not None and hosts.node_rank:
            _run_host(process, model, hosts, network)
            return
        scheduler = SchedulerProcess(process, model, schedule, network, experts)
        if process.parent_fd is not None:
            exit_with_parent(process.parent_fd)
        on_signals((signal.SIGTERM, signal.SIGINT), scheduler.stop, {signal.SIGUSR1: scheduler.dump})
        scheduler.run()
    except InsufficientMemoryError as error:
        fail(str(error))
        sys.exit(EXIT_SHORTAGE)
    except (AddressError, ChannelError, ConfigError, KeysError, ModelError) as error:
        sys.exit(fail(str(error)))


def _run_host(process: ProcessOptions, model: ModelOptions, hosts: HostOptions, network: "HostNetwork") -> None:
    """Run the ranks of a host other than 0 until told to stop."""
    from tercet.protocol.system.process import exit_with_parent, gc_disabled_during_imports, on_signals

    with gc_disabled_during_imports():
        from tercet.scheduler.executor.ranks.host_process import HostProcess

    host = HostProcess(process, model, hosts, network)
    if process.parent_fd is not None:
        exit_with_parent(process.parent_fd)
    on_signals((signal.SIGTERM, signal.SIGINT), host.stop)
    host.run()


@app.command
def probe(
    *,
    listen: str = ProcessOptions.listen,
    keys: Path | None = None,
    insecure_loopback: Annotated[bool, Parameter(negative="")] = False,
    live: Annotated[bool, Parameter(negative="")] = False,
    timeout: float = 2.0,
) -> None:
    """Exit with 0 if the scheduler that listens there can take work, or with --live if it lives; with 1 if not."""
    from tercet.protocol.errors import AddressError, ChannelError, KeysError
    from tercet.protocol.messages.values import Role
    from tercet.protocol.probe import probe as ask
    from tercet.protocol.transport.security import Security

    try:
        security = Security.load(keys, Role.SCHEDULER) if keys else None
        answered = ask(
            listen, Role.SCHEDULER, security, live=live, timeout=timeout, insecure_loopback=insecure_loopback
        )
    except (AddressError, ChannelError, KeysError) as error:
        sys.exit(fail(str(error)))
    sys.exit(0 if answered else 1)


@app.command
def pull(model: str) -> None:
    """Download a model; after an interrupted download, only missing files."""
    from tercet.scheduler.hub.model_cache import print_pulled

    _run_on_files(lambda: print_pulled(model))


@app.command
def models() -> None:
    """List the models on this machine, with their sizes."""
    from tercet.scheduler.hub.model_cache import print_models

    _run_on_files(print_models)


@app.command
def default_model() -> None:
    """Download the model that `tercet serve` serves by default. Print its name, or that of the embedded model."""
    from tercet.scheduler.hub.default_model import print_default_model

    _run_on_files(print_default_model)


@app.command
def dry_run(
    process: ProcessOptions = ProcessOptions(),
    model: ModelOptions = ModelOptions(),
    schedule: ScheduleOptions = ScheduleOptions(),
    hosts: HostOptions = HostOptions(),
    experts: ExpertOptions = ExpertOptions(),
    *,
    memory: int | None = None,
) -> None:
    """Print the memory of every process of the model, from its config.json alone. Exit with 1 if it does not fit.

    `memory` is that of each process in bytes; otherwise that of a GPU here, or an equal share of this machine's.
    """
    process.start_logging()
    from tercet.protocol.system.process import gc_disabled_during_imports

    with gc_disabled_during_imports():
        from tercet.scheduler.executor_factory import report_memory
        from tercet.scheduler.model_files import ModelError

    try:
        lines, fits = report_memory(model, schedule, experts, hosts.nnodes, memory)
    except (ConfigError, ModelError) as error:
        sys.exit(fail(str(error)))
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.exit(0 if fits else 1)


def _run_on_files(command: Callable[[], None]) -> None:
    from tercet.scheduler.model_files import ModelError

    try:
        command()
    except ModelError as error:
        sys.exit(fail(str(error)))
    except KeyboardInterrupt:
        fail("interrupted")
        sys.exit(_INTERRUPTED)


def fail(message: str) -> int:
    """Print in one line why the model cannot be served. Return the exit status."""
    sys.stderr.write(f"tercet-scheduler: {' '.join(message.split())}\n")
    return EXIT_CONFIG


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with the given arguments, or with those of the process."""
    with part_streams("tercet-scheduler"):
        try:
            app(arguments, exit_on_error=False, print_error=False)
        except (ConfigError, CycloptsError) as error:
            sys.exit(fail(str(error)))


if __name__ == "__main__":
    main()
