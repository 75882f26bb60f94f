"""Entry point of the `tercet` command: a Ctrl-C during the imports ends it silently."""

from collections.abc import Sequence

_INTERRUPTED = 130
"""Exit code after a Ctrl-C during the imports."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    try:
        from tercet.frontend.cli.main import main as run

        return run(arguments)
    except KeyboardInterrupt:
        return _INTERRUPTED
