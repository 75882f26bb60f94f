"""Limit on open files: too few are refused at the start, since libzmq would abort later."""

import subprocess
import sys

import pytest

RAISE = """
import resource, sys
from tercet.protocol.errors import ChannelError
from tercet.protocol.system.file_limit import raise_file_limit
soft, hard, lowest = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    print(raise_file_limit(lowest), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
except ChannelError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("soft", "hard", "lowest", "told"),
    [
        (64, 1000, 256, "1000 1000"),
        (256, 256, 256, "256 256"),
        (64, 255, 256, "this process may open 255 files, and needs at least 256 for its sockets: "),
        (500, 500, 501, "this process may open 500 files, and needs at least 501 for its sockets: "),
    ],
)
def test_the_file_limit_is_raised_and_checked_against_the_need(soft: int, hard: int, lowest: int, told: str) -> None:
    command = [sys.executable, "-c", RAISE, str(soft), str(hard), str(lowest)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith(told)
    assert done.stdout.count("\n") == 1
