import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from tercet.frontend.run_directory import run_directory

HOLD = """
import sys, time
from tercet.frontend.run_directory import run_directory
with run_directory() as directory:
    print(directory, flush=True)
    time.sleep(600)
"""


def test_it_is_private_short_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/tmp/" + "deep" * 20)
    with run_directory() as directory:
        (directory / "left.ipc").touch()
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert len(str(directory)) < 60
    assert not directory.exists()


def test_what_a_killed_process_left_goes_and_what_a_living_one_holds_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with run_directory() as place:
        monkeypatch.setattr("tempfile.tempdir", str(place))
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(place)}
        )
        assert holder.stdout
        with holder.stdout:
            held = Path(holder.stdout.readline().strip())
            assert held.parent == place
            unknown = place / "tercet-unknown"
            unknown.mkdir()
            with run_directory():
                assert held.exists()
            holder.send_signal(signal.SIGKILL)
            holder.wait()
        assert held.exists()
        with run_directory():
            assert not held.exists()
            assert unknown.exists()


def test_a_directory_that_another_start_takes_for_abandoned_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    really = fcntl.flock

    def flock(lock: IO[str], how: int) -> None:
        if how == fcntl.LOCK_EX and not taken:  # the other start has come in between
            taken.append(str(Path(lock.name).parent))
            shutil.rmtree(taken[0])
        really(lock, how)

    with run_directory() as held:
        monkeypatch.setattr("fcntl.flock", flock)
        with run_directory() as directory:
            assert directory.is_dir()
            assert str(directory) not in taken
        assert len(taken) == 1
        assert held.is_dir(), "whoever holds a lock keeps what is his"
