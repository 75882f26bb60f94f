"""`tercet serve` with some parts replaced by a program, which gets the part's module as an argument.

Usage: python tests/chaos/programs/rebuilt_server.py PROGRAM ROLE[,ROLE] OPTIONS
"""

import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from tercet.frontend.cli import main as cli
from tercet.frontend.supervisor.options import ServeConfig
from tercet.frontend.supervisor.parts import LaunchSpec, local_parts
from tercet.frontend.supervisor.serve import serve
from tercet.protocol.messages.values import Role


def rebuilt(part: LaunchSpec, program: str, roles: Collection[Role]) -> LaunchSpec:
    """Return the part with the program in place of `-m`, if it is of one of the roles."""
    if part.role not in roles:
        return part
    python, option, *words = part.command
    assert option == "-m"
    return replace(part, command=(python, program, *words))


def main(program: str, roles: str, *options: str) -> int:
    """Serve until a signal."""
    config = cli.app(["serve", *options], exit_on_error=False)
    assert isinstance(config, ServeConfig)
    others = [Role(role) for role in roles.split(",")]

    def parts(config: ServeConfig, directory: Path) -> Sequence[LaunchSpec]:
        return [rebuilt(part, program, others) for part in local_parts(config, directory)]

    return serve(config, parts)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
