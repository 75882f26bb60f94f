import contextlib
import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tercet.frontend.supervisor.run_directory import run_directory

HOLD = """
import sys, time
from tercet.frontend.supervisor.run_directory import run_directory
with run_directory() as directory:
    print(directory, flush=True)
    time.sleep(600)
"""


def test_it_is_private_short_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/tmp/" + "deep" * 20)
    with run_directory() as directory:
        with socket.socket(socket.AF_UNIX) as inbox:
            inbox.bind(str(directory / "left.ipc"))
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


MARK = b"Sockets of a `tercet serve`, which holds a lock of this file. Removed by a later one.\n"
Damage = Callable[[Path], object]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Use a short directory for temporary files, because socket paths are limited."""
    with tempfile.TemporaryDirectory(prefix="closed-", dir="/tmp") as directory:
        monkeypatch.setattr("tempfile.tempdir", directory)
        yield Path(directory)


def abandoned(place: Path, name: str = "tercet-abcd1234") -> Path:
    """Create the directory of a killed server."""
    path = place / name
    path.mkdir(mode=0o700)
    (path / "lock").write_bytes(MARK)
    with socket.socket(socket.AF_UNIX) as inbox:
        inbox.bind(str(path / "scheduler-0.0123456789abcdef.ipc"))
    return path


def test_what_a_killed_server_left_is_told_by_its_mark(place: Path) -> None:
    left = abandoned(place)
    with run_directory() as directory:
        assert (directory / "lock").read_bytes() == MARK
        assert not left.exists()


def link_lock(path: Path) -> None:
    (path / "lock").unlink()
    (path.parent / "mine").write_bytes(MARK)
    (path / "lock").symlink_to(path.parent / "mine")


def make_fifo(path: Path) -> None:
    (path / "lock").unlink()
    os.mkfifo(path / "lock")


def move_behind_a_link(path: Path) -> None:
    path.rename(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")


NOT_OURS: dict[str, Damage] = {
    "a lock file of another program": lambda path: (path / "lock").write_text(""),
    "more than the mark": lambda path: (path / "lock").write_bytes(MARK + b"x"),
    "no lock file": lambda path: (path / "lock").unlink(),
    "a lock that is a link": link_lock,
    "a lock that is a pipe": make_fifo,
    "a file of the user": lambda path: (path / "notes.txt").write_text("keep"),
    "a file named as a socket": lambda path: (path / "a.ipc").write_text("keep"),
    "a link named as a socket": lambda path: (path / "a.ipc").symlink_to(path / "scheduler-0.0123456789abcdef.ipc"),
    "a folder": lambda path: (path / "folder").mkdir(),
    "another mode": lambda path: path.chmod(0o755),
    "another name": lambda path: path.rename(path.parent / "tercet-notes-of-mine"),
    "a link to a directory": move_behind_a_link,
}


@pytest.mark.parametrize("damage", NOT_OURS.values(), ids=NOT_OURS.keys())
def test_a_directory_that_may_be_the_user_s_is_left_as_it_is(place: Path, damage: Damage) -> None:
    damage(abandoned(place))
    before = sorted(str(path) for path in place.rglob("*"))
    with run_directory():
        pass
    assert sorted(str(path) for path in place.rglob("*")) == before


def test_at_its_own_end_a_server_leaves_what_is_not_its_own(place: Path) -> None:
    with run_directory() as directory:
        (directory / "notes.txt").write_text("keep")
    assert (directory / "notes.txt").read_text() == "keep"
    assert directory.parent == place


def test_a_directory_is_not_taken_for_abandoned_before_its_lock_is_held(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = fcntl.flock
    others: list[Path] = []

    def flock(lock: int, how: int) -> None:
        if how == fcntl.LOCK_EX and not others:  # another start comes in between
            others.append(Path(os.readlink(f"/proc/self/fd/{lock}")).parent)
            with run_directory() as other:
                assert other != others[0]
        really(lock, how)

    monkeypatch.setattr("fcntl.flock", flock)
    with run_directory() as directory:
        assert others == [directory]
        assert directory.is_dir()
        assert directory.parent == place


def test_a_full_disk_does_not_stop_a_start(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.write", write)
        with run_directory() as directory:
            assert directory.is_dir()
    assert not directory.exists()
    assert place.is_dir()


@pytest.mark.parametrize("temporary", ["/tmp/" + "deep" * 20, "/tmp/closed-[a]", "/nowhere/at/all"])
def test_a_place_that_cannot_hold_sockets_is_passed_over(temporary: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("TMPDIR", temporary)
    with contextlib.suppress(FileNotFoundError, FileExistsError):
        os.mkdir(temporary)
    with run_directory() as directory:
        assert directory.parent == Path("/tmp")
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(temporary)


def test_no_place_at_all_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/proc/self")
    with (
        pytest.raises(OSError, match=r"no directory for sockets can be made: .*Set TMPDIR to") as raised,
        run_directory(),
    ):
        pass
    assert "\n" not in str(raised.value)
