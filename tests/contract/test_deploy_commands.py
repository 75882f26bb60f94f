"""Every command line in deploy/ is valid for its program: options, values and subcommands."""

import pytest
from cyclopts import App

from tercet.detokenizer.__main__ import app as detokenizer_app
from tercet.frontend.__main__ import app as frontend_app
from tercet.frontend.cli.main import app as tercet_app
from tercet.scheduler.__main__ import app as scheduler_app
from tests.deploy_files import commands

APPS: dict[str, App] = {
    "tercet": tercet_app,
    "tercet-frontend": frontend_app,
    "tercet-scheduler": scheduler_app,
    "tercet-detokenizer": detokenizer_app,
}


@pytest.mark.parametrize(("where", "command"), [pytest.param(*each, id=each[0]) for each in commands()])
def test_every_command_is_one_that_its_program_takes(where: str, command: list[str]) -> None:
    values = {"$(POD_NAME)": "scheduler-6c8f7d9b5-x2kqz", "$(LWS_WORKER_INDEX)": "1", "$(LWS_LEADER_ADDRESS)": "leader"}
    words = command[1:]
    for name, value in values.items():
        words = [word.replace(name, value) for word in words]
    APPS[command[0]].parse_args(words, exit_on_error=False, print_error=False)
