"""`tercet serve` with schedulers that die of one prompt."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tercet.frontend import cli
from tercet.frontend.launch import Part, local_parts
from tercet.frontend.serve_config import ServeConfig
from tercet.frontend.server import serve
from tercet.protocol.values import Role

SCHEDULER = Path(__file__).with_name("fragile_scheduler.py")


def fragile_parts(config: ServeConfig, directory: Path) -> Sequence[Part]:
    """The ordinary parts, with another program for the schedulers."""
    parts = []
    for part in local_parts(config, directory):
        if part.role is Role.SCHEDULER:
            assert part.command[1:3] == ("-m", "tercet.scheduler")
            part = replace(part, command=(sys.executable, str(SCHEDULER), *part.command[3:]))
        parts.append(part)
    return parts


if __name__ == "__main__":
    config = cli.app(["serve", *sys.argv[1:]], exit_on_error=False)
    assert isinstance(config, ServeConfig)
    raise SystemExit(serve(config, fragile_parts))
