"""The `tercet` command from its first moment on: a Ctrl-C while it is still being imported ends it without a word."""

_INTERRUPTED = 130
"""Exit code after a Ctrl-C that came before anything was there to stop."""


def main() -> int:
    """Run the command line; returns the exit code."""
    try:
        from tercet.frontend.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        return _INTERRUPTED
