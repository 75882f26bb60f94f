"""Command line of `tercet-detokenizer`, also `python -m tercet.detokenizer`: one detokenizer process."""

import logging
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter

from tercet.detokenizer.__about__ import __version__
from tercet.detokenizer.config import DetokenizerConfig
from tercet.detokenizer.detokenizer_manager import DetokenizerManager
from tercet.detokenizer.errors import ConfigError
from tercet.detokenizer.loop import DetokenizerLoop
from tercet.detokenizer.status import StatusBoard
from tercet.detokenizer.tokenizer_store import TokenizerStore
from tercet.protocol.errors import AddressError, ChannelError, KeysError
from tercet.protocol.messages.messages import DetokenizerInbox, Heartbeat
from tercet.protocol.messages.values import Role
from tercet.protocol.node import NodeConfig, ThreadNode, unanswered
from tercet.protocol.probe import probe as ask
from tercet.protocol.system.clock import SuspendAwareClock
from tercet.protocol.system.file_limit import raise_file_limit
from tercet.protocol.system.process import exit_with_parent, on_signals
from tercet.protocol.system.streams import part_streams
from tercet.protocol.transport.security import Security

EXIT_CONFIG = 2
"""Exit status for options that cannot work: restarting would not help."""

logger = logging.getLogger("tercet.detokenizer")
app = App(name="tercet-detokenizer", version=__version__, help="Turn token ids into text.")


@app.default
def serve(config: DetokenizerConfig = DetokenizerConfig()) -> None:
    """Turn the tokens of schedulers into text for frontends until told to stop."""
    config.start_logging()
    raise_file_limit()
    links = _links(config)
    tokenizers = TokenizerStore()
    manager = DetokenizerManager(tokenizers, config.max_choices)
    board = StatusBoard(manager, SuspendAwareClock())
    node = ThreadNode(links, DetokenizerInbox, board.heartbeat, {Heartbeat: unanswered})
    loop = DetokenizerLoop(node, manager, tokenizers, board, time.monotonic, config.max_backlog)
    on_signals((signal.SIGTERM, signal.SIGINT), loop.stop)
    if config.parent_fd is not None:
        exit_with_parent(config.parent_fd)
    node.start()
    loop.run(config.drain_grace)
    node.close("stopping")
    logger.info("detokenizer stopped: open_choices=%d counters=%s", len(manager), dict(manager.counters))


@app.command
def probe(
    *,
    listen: str = DetokenizerConfig.listen,
    keys: Path | None = None,
    insecure_loopback: Annotated[bool, Parameter(negative="")] = False,
    live: Annotated[bool, Parameter(negative="")] = False,
    timeout: float = 2.0,
) -> None:
    """Exit with 0 if the detokenizer that listens there can take work, or with --live if it lives; with 1 if not."""
    answered = ask(
        listen, Role.DETOKENIZER, _keys(keys), live=live, timeout=timeout, insecure_loopback=insecure_loopback
    )
    sys.exit(0 if answered else 1)


def _keys(folder: Path | None) -> Security | None:
    return Security.load(folder, Role.DETOKENIZER) if folder else None


def _links(config: DetokenizerConfig) -> NodeConfig:
    try:
        return config.node_config(Role.DETOKENIZER)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def main(arguments: list[str] | None = None) -> None:
    """Run with these arguments, or those of the process."""
    with part_streams("tercet-detokenizer"):
        try:
            app(arguments, exit_on_error=False, print_error=False)
        except (AddressError, ChannelError, ConfigError, CycloptsError, KeysError) as error:
            sys.stderr.write(f"tercet-detokenizer: {' '.join(str(error).split())}\n")
            sys.exit(EXIT_CONFIG)


if __name__ == "__main__":
    main()
