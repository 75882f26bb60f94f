"""Start of the `tercet` command."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys

class Interrupts:
    moment = sys.argv.pop()

    def find_spec(self, name, *_):
        if name == self.moment:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupts())
from tercet.frontend.cli.command import main
sys.exit(main())
"""


@pytest.mark.parametrize("command", ["serve", "chat"])
@pytest.mark.parametrize("moment", ["cyclopts", "COMMAND"])
def test_a_ctrl_c_while_a_module_is_imported_ends_it_quietly(command: str, moment: str) -> None:
    moment = moment.replace("COMMAND", f"tercet.frontend.{'supervisor.serve' if command == 'serve' else 'cli.chat'}")
    started = [sys.executable, "-c", PROGRAM, command, moment]
    ended = subprocess.run(started, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
