"""Command line of one frontend process: `tercet-frontend`, or `python -m tercet.frontend`."""

import asyncio
import sys
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter

from tercet.frontend.__about__ import __version__
from tercet.frontend.config.config import FrontendConfig
from tercet.protocol.system.streams import part_streams

EXIT_CONFIG = 2
"""Exit status for invalid options: a restart would not help."""

SWITCH_INTERVAL = 0.0005
"""Seconds for which a thread that renders or tokenizes may keep the interpreter's lock from the event loop. The default
is 5 ms, and sending a token takes the lock several times."""

app = App(name="tercet-frontend", version=__version__, help="Serve the OpenAI API over HTTP.")


@app.default
def serve(config: FrontendConfig = FrontendConfig()) -> None:
    """Serve HTTP clients with the schedulers and detokenizers named, until told to stop."""
    config.link.start_logging()
    from tercet.protocol.system.process import exit_with_parent, gc_disabled_during_imports

    with gc_disabled_during_imports():
        import uvloop

        from tercet.frontend.wiring import Frontend
        from tercet.protocol.errors import ProtocolError
        from tercet.protocol.system.file_limit import raise_file_limit

    sys.setswitchinterval(SWITCH_INTERVAL)

    async def run() -> None:
        await Frontend(config).run()

    if config.link.parent_fd is not None:
        exit_with_parent(config.link.parent_fd)
    try:
        raise_file_limit()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run())
    except (OSError, ValueError, ProtocolError) as error:
        sys.stderr.write(f"tercet-frontend: {error}\n")
        sys.exit(EXIT_CONFIG)


@app.command
def probe(
    url: str = "http://127.0.0.1:8000",
    *,
    live: Annotated[bool, Parameter(negative="")] = False,
    timeout: float = 2.0,
) -> None:
    """Exit with 0 if the frontend at a URL can take requests, or with --live if it answers at all; with 1 if not."""
    from http.client import HTTPException
    from urllib.request import ProxyHandler, build_opener

    try:
        opener = build_opener(ProxyHandler({}))  # the URL is local: ignore proxies from the environment
        with opener.open(f"{url.rstrip('/')}/{'live' if live else 'health'}", timeout=timeout):
            sys.exit(0)
    except (OSError, HTTPException, ValueError) as error:
        sys.stderr.write(f"tercet-frontend: {url}: {error}\n")
        sys.exit(1)


def main() -> None:
    """Run the command line of this process."""
    with part_streams("tercet-frontend"):
        try:
            app(sys.argv[1:], exit_on_error=False, print_error=False)
        except (CycloptsError, ValueError) as error:  # option errors only: `serve` handles later ones
            sys.stderr.write(f"tercet-frontend: {' '.join(str(error).split())}\n")
            sys.exit(EXIT_CONFIG)


if __name__ == "__main__":
    main()
