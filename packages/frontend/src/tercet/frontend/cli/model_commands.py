"""Commands on a machine's models, which the scheduler's package runs: `tercet pull`, `tercet models`."""

import importlib.util
import subprocess
import sys

from tercet.frontend.supervisor.options import ConfigError


def run_scheduler(*arguments: str) -> int:
    """Run a command of the scheduler's package on these streams, and return its exit code.

    Raises ConfigError unless it is installed.
    """
    if importlib.util.find_spec("tercet.scheduler") is None:
        raise ConfigError("tercet-scheduler is not installed: docs/install.md installs all parts")
    sys.stdout.flush()
    with subprocess.Popen([sys.executable, "-m", "tercet.scheduler", *arguments]) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:  # the process got it, too, and ends
                continue
