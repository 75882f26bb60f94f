"""`tercet-frontend`, also `python -m tercet.frontend`: one frontend process."""

import asyncio
import logging
import sys

from cyclopts import App, CycloptsError

from tercet.frontend.__about__ import __version__
from tercet.frontend.config import FrontendConfig

EXIT_CONFIG = 2
"""Exit status for options that cannot work: starting again would not help."""

app = App(name="tercet-frontend", version=__version__, help="Serve the OpenAI API over HTTP.")


@app.default
def serve(config: FrontendConfig = FrontendConfig()) -> None:
    """Serve HTTP clients with the schedulers and detokenizers named, until told to stop."""
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    import uvloop

    from tercet.frontend.wiring import Frontend
    from tercet.protocol.errors import ProtocolError
    from tercet.protocol.lifecycle import exit_with_parent

    async def run() -> None:
        await Frontend(config).run()

    if config.link.parent_fd is not None:
        exit_with_parent(config.link.parent_fd)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run())
    except (OSError, ValueError, ProtocolError) as error:
        sys.stderr.write(f"tercet-frontend: {error}\n")
        sys.exit(EXIT_CONFIG)


def main() -> None:
    """Run with the process's own arguments."""
    try:
        app(exit_on_error=False)
    except CycloptsError:
        sys.exit(EXIT_CONFIG)


if __name__ == "__main__":
    main()
