"""No process of a model outlives another, whatever it waits for, and none leaves anything behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from packages.scheduler.tests.executor.test_tp_worker import CONFIG
from tercet.scheduler.executor.ranks.worker_process import _is_stopped

LIMIT = 60.0
SOON = 15.0
Leader = Callable[[str], "Rank0"]


class Rank0:
    """`rank_program.py`, and its follower."""

    def __init__(self, mode: str, model: Path, place: Path) -> None:
        program = Path(__file__).with_name("rank_program.py")
        self.place = place
        self.process = subprocess.Popen(
            [sys.executable, program, mode, model],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(place)},
        )
        self.follower = int(self.heard("rank 1 is"))

    def heard(self, words: str) -> str:
        """Wait until it says this, and return what it says after it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(words):
                return line.removeprefix(words).strip()
        raise AssertionError(self.process.communicate()[1])

    def ended(self) -> tuple[int, str]:
        """Its exit status, which must be there soon, and what it complained of."""
        _, complaint = self.process.communicate(timeout=SOON)
        return self.process.returncode, complaint

    @property
    def follows(self) -> bool:
        """Whether its follower lives."""
        try:
            return ") Z " not in Path(f"/proc/{self.follower}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):  # the second where it goes between opening and reading
            return False

    def assert_nothing_is_left(self) -> None:
        end = time.monotonic() + SOON
        while self.follows or [*self.place.iterdir()]:
            assert time.monotonic() < end, (self.follows, [*self.place.iterdir()])
            time.sleep(0.01)


@pytest.fixture
def leader(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Leader]:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    started: list[Rank0] = []

    def start(mode: str) -> Rank0:
        started.append(Rank0(mode, tmp_path, tmp_path_factory.mktemp("t")))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.communicate()
        if each.follows:
            os.kill(each.follower, signal.SIGKILL)


def test_rank_0_exits_when_an_awaited_rank_dies(leader: Leader) -> None:
    rank_0 = leader("stepping")
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(rank_0.follower, number)
    for _ in range(3):
        rank_0.heard("steps")
    os.kill(rank_0.follower, signal.SIGSTOP)
    time.sleep(0.1)  # by then rank 0 waits for it: a step takes a hundredth of that
    assert rank_0.process.poll() is None
    os.kill(rank_0.follower, signal.SIGKILL)
    code, complaint = rank_0.ended()
    assert code == 1
    assert "rank 1 of this model ended, shutting down the others: killed by SIGKILL" in complaint
    rank_0.assert_nothing_is_left()


def test_a_rank_that_hangs_is_noticed_within_three_seconds(leader: Leader) -> None:
    rank_0 = leader("stepping")
    rank_0.heard("steps")
    os.kill(rank_0.follower, signal.SIGSTOP)
    began = time.monotonic()
    code, complaint = rank_0.ended()
    assert time.monotonic() - began < 3.0 * machine_load()
    assert code == 1
    assert "rank 1 of this model ended, shutting down the others: it hangs, and is killed" in complaint
    rank_0.assert_nothing_is_left()


def test_a_process_that_lacks_a_core_is_not_stopped() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"], stdout=-1
    ) as own:
        assert own.stdout is not None
        own.stdout.readline()
        assert not _is_stopped(own.pid)
        os.kill(own.pid, signal.SIGSTOP)
        end = time.monotonic() + SOON
        while not _is_stopped(own.pid):
            assert time.monotonic() < end
        own.kill()
    assert not _is_stopped(own.pid)


def machine_load() -> float:
    """Return the slow-down of this machine by its load, at least 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@pytest.mark.parametrize(("mode", "words"), [("waiting", "the step is left"), ("meeting", "")])
def test_ranks_exit_with_rank_0_in_collectives_and_while_loading(mode: str, words: str, leader: Leader) -> None:
    rank_0 = leader(mode)
    if words:
        rank_0.heard(words)
    time.sleep(0.2)  # for the follower to get into what it will not get out of
    assert rank_0.follows
    rank_0.process.kill()
    rank_0.assert_nothing_is_left()


def test_options_that_only_a_follower_finds_wrong_are_tried_again(leader: Leader) -> None:
    rank_0 = leader("refused")
    rank_0.process.wait(LIMIT)
    code, complaint = rank_0.ended()
    assert code == 1, "it may have lacked what it will find the next time"
    assert "shutting down the others: tercet-scheduler: no attention backend 'none'" in complaint
    rank_0.assert_nothing_is_left()


def test_options_that_all_find_wrong_are_not(
    checkpoints: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    command = [sys.executable, "-m", "tercet.scheduler", "--model", str(checkpoints("llama")), "--device", "cpu"]
    command += ["--listen", f"ipc://{tmp_path_factory.mktemp('run')}", "--tensor-parallel-size", "2"]
    ended = subprocess.run(
        [*command, "--context-length", "513"], stderr=subprocess.PIPE, text=True, timeout=LIMIT, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == "tercet-scheduler: context_length 513 is beyond the model's 512"
