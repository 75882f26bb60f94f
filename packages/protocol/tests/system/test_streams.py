"""Processes whose standard streams cannot be written to continue to run."""

import signal
import subprocess
import sys

import pytest

LOGS = """
import logging, os, socket, sys
from tercet.protocol.system.streams import prepare_streams
prepare_streams()
logging.basicConfig(level="INFO")
for _ in range(1000):
    logging.info("a line that has no place")
    sys.stderr.write("nor has this one\\n")
with socket.socket() as first:
    assert first.fileno() > 2, first.fileno()
    os.write(3 if len(sys.argv) < 2 else int(sys.argv[1]), b"went on")
sys.exit(7)
"""


@pytest.mark.parametrize("streams", ["2>/dev/full", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_a_log_that_cannot_be_written_changes_nothing(streams: str) -> None:
    command = ["bash", "-c", f'exec 9>&1; exec "$@" 9 {streams}', "bash", sys.executable, "-c", LOGS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (7, "went on")


def test_a_log_whose_reader_is_gone_changes_nothing() -> None:
    command = ["bash", "-c", 'exec 9>&1; "$@" 9 2> >(exec true)', "bash", sys.executable, "-c", LOGS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (7, "went on")


def test_what_can_be_written_is_written_in_order() -> None:
    code = (
        "import sys; from tercet.protocol.system.streams import keep_output, prepare_streams; prepare_streams();"
        "keep_output(); sys.stdout.write('a\\n'); sys.stderr.write('b\\n'); sys.stdout.write('\\u00e9'); "
    )
    command = [sys.executable, "-X", "utf8", "-c", code]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=60)
    assert done.stdout.decode() == "a\nb\n\u00e9"


def test_a_part_that_a_native_fault_ends_leaves_its_stacks() -> None:
    code = (
        "import os, signal\nfrom tercet.protocol.system.streams import part_streams\n"
        "def compute():\n    os.kill(os.getpid(), signal.SIGSEGV)\n"
        "with part_streams('tercet-part'):\n    compute()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in done.stderr
    assert "in compute" in done.stderr
