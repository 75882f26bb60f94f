"""Tests of tools/idle.py: processor time since the start of the measurement, and the processes of a server."""

import os
import subprocess
import sys

import pytest

from tools import idle
from tools.idle import Cost, Part, Use


def test_what_was_used_in_between_is_counted_by_thread_and_part() -> None:
    before = {7: Part("scheduler-0", 5, {"main 7": Use(1_000_000_000, 100), "io 8": Use(0, 0)})}
    after = {
        7: Part("scheduler-0", 3_000_000, {"main 7": Use(1_200_000_000, 150), "io 9": Use(20_000_000, 4)}),
        9: Part("frontend-0", 1_000_000, {"main 9": Use(10_000_000, 2)}),
    }
    scheduler, frontend = idle.compare(before, after, seconds=2.0)
    assert (scheduler.part, scheduler.pss_mb) == ("scheduler-0", 3.0)
    assert scheduler.cpu_percent == pytest.approx(10 + 1)
    assert scheduler.wakes_per_second == pytest.approx(27)
    assert scheduler.threads["io 9"] == Cost(pytest.approx(1.0), pytest.approx(2.0))  # type: ignore[arg-type]
    assert frontend.cpu_percent == pytest.approx(0.5), "a part that is new is counted from its start"


def test_every_process_of_a_server_is_looked_at() -> None:
    waits = "import sys; sys.stdin.read()"
    command = [sys.executable, "-c", waits, "tercet.frontend", "--peer", "frontend-3"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        parts = idle.look(os.getpid())
        assert parts[os.getpid()].name == "supervisor"
        assert parts[child.pid].name == "frontend-3"
        assert parts[child.pid].pss > 0
        assert sum(use.nanoseconds for use in parts[os.getpid()].threads.values()) > 0
