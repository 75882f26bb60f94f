"""`tercet-scheduler`, also `python -m tercet.scheduler`: one scheduler process."""

import logging
import signal
import sys

from cyclopts import App

from tercet.scheduler.__about__ import __version__
from tercet.scheduler.config import ConfigError, ModelOptions, ProcessOptions, ScheduleOptions

EXIT_CONFIG = 2
"""Exit status for options that cannot work: starting again would not help."""

app = App(name="tercet-scheduler", version=__version__, help="Schedule and execute one model.")


@app.default
def serve(
    process: ProcessOptions = ProcessOptions(),
    model: ModelOptions = ModelOptions(),
    schedule: ScheduleOptions = ScheduleOptions(),
) -> None:
    """Load a model and serve it to frontends until told to stop."""
    logging.basicConfig(level=process.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from tercet.protocol.lifecycle import exit_with_parent
    from tercet.scheduler.model_files import ModelError
    from tercet.scheduler.wiring import SchedulerProcess

    try:
        scheduler = SchedulerProcess(process, model, schedule)
    except (ModelError, ConfigError) as error:
        sys.exit(fail(str(error)))
    if process.parent_fd is not None:
        exit_with_parent(process.parent_fd)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: scheduler.stop())
    try:
        scheduler.run()
    except (ModelError, ConfigError) as error:
        sys.exit(fail(str(error)))


def fail(message: str) -> int:
    """Say why nothing can be served, in one line."""
    sys.stderr.write(f"tercet-scheduler: {message}\n")
    return EXIT_CONFIG


def main() -> None:
    """Run with the process's own arguments."""
    try:
        app()
    except ConfigError as error:
        sys.exit(fail(str(error)))


if __name__ == "__main__":
    main()
