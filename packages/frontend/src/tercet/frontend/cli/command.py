"""Entry point of the `tercet` command: a Ctrl-C during the imports ends it silently."""

_INTERRUPTED = 130
"""Exit code after a Ctrl-C during the imports."""


def main() -> int:
    """Run the command line and return the exit code."""
    try:
        from tercet.frontend.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        return _INTERRUPTED
