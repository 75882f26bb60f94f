import contextlib
import dataclasses
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path

import pytest

from tercet.frontend.supervisor import supervisor as supervisor_module
from tercet.frontend.supervisor.parts import LaunchSpec
from tercet.frontend.supervisor.restart_policy import Timeouts
from tercet.frontend.supervisor.run_directory import run_directory
from tercet.frontend.supervisor.supervisor import Supervisor
from tercet.frontend.supervisor.terminal import PlainTerminal
from tercet.protocol.messages.messages import Ready
from tercet.protocol.messages.values import Role

PART = Path(__file__).parents[1] / "parts" / "part.py"
TIMEOUTS = Timeouts(backoff=0.1, silence=1.5, startup=30.0)


class Screen(PlainTerminal):
    """Terminal that keeps every line, and can be stopped."""

    def __init__(self) -> None:
        super().__init__(StringIO())
        self.lines: list[str] = []
        self.goes_on = threading.Event()
        self.goes_on.set()

    def line(self, text: str) -> None:
        self.goes_on.wait()
        self.lines.append(text)

    def has(self, text: str) -> bool:
        return any(text in line for line in self.lines)


def part(name: str, mode: str, marker: Path | None = None) -> LaunchSpec:
    once = (f"--once={marker}",) if marker else ()
    return LaunchSpec(name, Role(name.partition("-")[0]), (sys.executable, str(PART), mode, *once))


class Run:
    """Supervisor in a thread of its own."""

    def __init__(self, directory: Path, *parts: LaunchSpec, timeouts: Timeouts = TIMEOUTS, drain: float = 10.0) -> None:
        self.directory = directory
        self.screen = Screen()
        self.ready = threading.Event()
        self.readies: list[dict[str, Ready]] = []
        self.supervisor = Supervisor(
            parts,
            directory,
            self.screen,
            timeouts=timeouts,
            drain=drain,
            on_ready=self.ready.set,
            announce=self.readies.append,
            log_level="warning",
        )
        self.code: int | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        self.code = self.supervisor.run()

    def wait(self, what: Callable[[], object], seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end, self.screen.lines
            assert self.thread.is_alive() or what(), self.screen.lines
            time.sleep(0.01)

    def wait_ready(self) -> None:
        self.wait(lambda: self.readies)

    def wait_line(self, text: str) -> None:
        self.wait(lambda: self.screen.has(text))

    def end(self) -> int | None:
        self.supervisor.stop()
        self.thread.join(30)
        assert not self.thread.is_alive()
        return self.code


@pytest.fixture
def start() -> Iterator[Callable[..., Run]]:
    with run_directory() as directory, contextlib.ExitStack() as stack:

        def start_parts(*parts: LaunchSpec, timeouts: Timeouts = TIMEOUTS, drain: float = 10.0) -> Run:
            run = Run(directory, *parts, timeouts=timeouts, drain=drain)
            stack.callback(run.end)
            return run

        yield start_parts


Start = Callable[..., Run]


def is_alive(pid: int) -> bool:
    """Return whether a process runs; zombies do not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # ProcessLookupError if it ends between opening and reading
        return False


def wait_gone(*pids: int) -> None:
    end = time.monotonic() + 20
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < end, [pid for pid in pids if is_alive(pid)]
        time.sleep(0.01)


def test_all_parts_start_get_ready_and_stop_cleanly(start: Start) -> None:
    run = start(part("scheduler-0", "serve"), part("detokenizer-0", "serve"))
    run.wait_ready()
    pids = run.supervisor.pids()
    assert set(pids) == set(run.readies[0]) == {"scheduler-0", "detokenizer-0"}
    assert run.screen.has("scheduler-0 is ready: tiny, context 2,048 tokens, KV cache 65,536 tokens")
    run.wait_line("scheduler-0: scheduler-0 says hello")
    assert run.end() == 0
    assert len(run.readies) == 1
    wait_gone(*pids.values())
    assert not run.screen.has("died")


def test_a_part_told_nonsense_ends_the_start_at_once_with_its_own_words(start: Start) -> None:
    run = start(part("scheduler-0", "refuse"), part("detokenizer-0", "serve"))
    run.wait(lambda: run.code is not None)
    assert run.code == 2
    assert run.screen.lines[-1] == "tercet: error: scheduler-0: --dtype: no such dtype: float7"
    assert not run.screen.has("starts again")


def test_a_part_that_never_gets_ready_is_given_up_after_three_deaths(start: Start) -> None:
    run = start(part("scheduler-0", "crash"), part("detokenizer-0", "serve"))
    run.wait(lambda: run.code is not None)
    assert run.code == 1
    assert sum("starts again" in line for line in run.screen.lines) == 2
    assert run.screen.has(
        "scheduler-0 died 3 times before it was ready: RuntimeError: the weights are torn (exit code 1)"
    )
    assert run.readies == []


def test_startup_arguments_are_dropped_once_a_part_was_ready(start: Start, tmp_path: Path) -> None:
    dies = part("scheduler-0", "die", tmp_path / "died")
    run = start(dataclasses.replace(dies, startup_args=("--at-first",)), part("detokenizer-0", "serve"))
    run.wait(lambda: sum("scheduler-0 says hello" in line for line in run.screen.lines) == 2)
    said = [line.partition(" says ")[2] for line in run.screen.lines if "scheduler-0 says hello" in line]
    assert said == ["hello at first", "hello"]
    assert run.end() == 0


def test_a_model_that_embeds_waits_for_no_detokenizer(start: Start) -> None:
    run = start(part("scheduler-0", "embed"), part("detokenizer-0", "loading"), part("frontend-0", "serve"))
    run.wait_ready()
    assert run.readies[0].keys() == {"scheduler-0", "frontend-0"}
    assert not run.screen.has("KV cache")
    assert run.end() == 0


def test_a_dead_part_restarts_alone(start: Start, tmp_path: Path) -> None:
    run = start(part("scheduler-0", "serve"), part("detokenizer-0", "die", tmp_path / "died"))
    run.wait_line("warning: detokenizer-0 died: killed by SIGKILL (did memory run out?); it starts again now")
    before = run.supervisor.pids()["scheduler-0"]
    run.wait(lambda: sum("detokenizer-0 is ready" in line for line in run.screen.lines) == 2)
    assert run.supervisor.pids()["scheduler-0"] == before
    assert sum("scheduler-0 is ready" in line for line in run.screen.lines) == 1
    assert len(run.readies) == 1


def test_a_dead_parts_inbox_is_removed(start: Start) -> None:
    run = start(part("scheduler-0", "serve"))
    run.wait_ready()
    (inbox,) = run.directory.glob("scheduler-0.*.ipc")
    os.kill(run.supervisor.pids()["scheduler-0"], signal.SIGKILL)
    run.wait(lambda: not inbox.exists())


def test_a_part_that_is_asked_to_leave_is_replaced_at_once(start: Start) -> None:
    run = start(part("scheduler-0", "serve"), timeouts=Timeouts(backoff=20.0, clean_exit_after=0.0))
    run.wait_ready()
    for restart in (1, 2):
        os.kill(run.supervisor.pids()["scheduler-0"], signal.SIGTERM)
        run.wait(lambda: sum("scheduler-0 left" in line for line in run.screen.lines) == restart)  # noqa: B023
        run.wait(lambda: sum("scheduler-0 is ready" in line for line in run.screen.lines) == restart + 1)  # noqa: B023


def test_a_part_that_keeps_exiting_is_restarted_with_backoff(start: Start) -> None:
    run = start(part("scheduler-0", "leave"), part("detokenizer-0", "serve"))
    run.wait_line("scheduler-0 died: exit code 0; it starts again now")
    run.wait(lambda: sum("scheduler-0 is ready" in line for line in run.screen.lines) >= 4)
    assert run.code is None


def test_a_part_that_floods_its_output_holds_up_nobody(start: Start) -> None:
    run = start(part("scheduler-0", "flood"), part("detokenizer-0", "serve"))
    run.wait_ready()
    run.wait_line("came too fast and were left out")
    os.kill(run.supervisor.pids()["detokenizer-0"], signal.SIGKILL)
    run.wait_line("detokenizer-0 died")
    run.wait(lambda: sum("detokenizer-0 is ready" in line for line in run.screen.lines) == 2)
    assert not run.screen.has("hangs")
    assert run.end() == 0


def test_a_stopped_terminal_keeps_nobody_from_being_ready(start: Start) -> None:
    run = start(part("scheduler-0", "serve"))
    run.screen.goes_on.clear()
    try:
        assert run.ready.wait(30)
        assert run.readies == []
    finally:
        run.screen.goes_on.set()
    run.wait_ready()


def test_a_part_that_cannot_be_started_at_all_is_told_and_given_up(start: Start) -> None:
    run = start(LaunchSpec("scheduler-0", Role.SCHEDULER, ("/no/such/program",)), part("detokenizer-0", "serve"))
    run.wait(lambda: run.code is not None)
    assert run.code == 1
    assert "scheduler-0 died 3 times before it was ready: cannot be started: " in run.screen.lines[-1]
    assert "/no/such/program" in run.screen.lines[-1]


def test_a_part_that_goes_silent_is_killed_and_restarted(start: Start, tmp_path: Path) -> None:
    run = start(part("scheduler-0", "hang", tmp_path / "hung"), part("detokenizer-0", "serve"))
    run.wait_line("warning: scheduler-0 hangs and is killed: no heartbeat")
    run.wait(lambda: sum("scheduler-0 is ready" in line for line in run.screen.lines) == 2)
    assert not run.screen.has("detokenizer-0 hangs")


def test_a_part_stuck_in_a_step_is_killed_though_it_heartbeats(start: Start, tmp_path: Path) -> None:
    run = start(part("scheduler-0", "stuck", tmp_path / "stuck"))
    run.wait_line("warning: scheduler-0 hangs and is killed: stuck in one step")
    run.wait(lambda: sum("scheduler-0 is ready" in line for line in run.screen.lines) == 2)


def test_a_start_that_takes_too_long_names_the_part(start: Start) -> None:
    run = start(part("scheduler-0", "loading"), timeouts=Timeouts(startup=2.0))
    run.wait(lambda: run.code is not None)
    assert run.code == 1
    assert "tercet: error: scheduler-0 was not ready within 2 s (--startup-timeout): it said " in run.screen.lines[-1]
    assert [line for line in run.screen.lines if "weights" in line] == [
        f"scheduler-0: weights {percent}%" for percent in range(0, 101, 10)
    ]


def test_a_slow_start_tells_how_far_each_part_is_linked(start: Start) -> None:
    deaf = LaunchSpec("detokenizer-0", Role.DETOKENIZER, (sys.executable, "-c", "import time; time.sleep(60)"))
    run = start(deaf, timeouts=Timeouts(loading_silence=0.5))
    run.wait_line("its start: it has said nothing (it does not listen, and is not linked)")


def test_it_tells_of_each_link(start: Start) -> None:
    run = start(part("scheduler-0", "loading"))
    run.wait_line("weights 100%")
    (inbox,) = run.directory.glob("scheduler-0.*.ipc")
    state = run.supervisor._describe_links("scheduler-0")
    assert state == f"ipc://{inbox} state=up peer=scheduler-0 hello_sent=yes"
    (run.directory / "detokenizer-0.0.ipc").touch()
    assert run.supervisor._describe_links("detokenizer-0") == "it listens, and is not linked"


def test_a_start_whose_directory_somebody_removes_says_so(start: Start) -> None:
    run = start(part("scheduler-0", "loading"))
    run.wait_line("weights 100%")
    shutil.rmtree(run.directory)
    run.wait(lambda: run.code is not None)
    assert run.code == 1
    assert f"error: {run.directory}, where the sockets of its parts lie, was removed" in run.screen.lines[-1]


def test_a_removed_run_directory_ends_the_server_at_the_next_restart(start: Start) -> None:
    run = start(part("scheduler-0", "serve"), part("detokenizer-0", "serve"))
    run.wait_ready()
    shutil.rmtree(run.directory)
    run.supervisor._node.wake()
    run.thread.join(1.5 * supervisor_module.POLL_INTERVAL)
    assert run.thread.is_alive()
    os.kill(run.supervisor.pids()["scheduler-0"], signal.SIGKILL)
    run.wait(lambda: run.code is not None)
    assert run.code == 1
    assert "was removed" in run.screen.lines[-1]


def test_a_part_that_will_not_stop_is_killed_in_the_end(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "TERMINATE_GRACE", 0.5)
    run = start(part("scheduler-0", "stubborn"))
    run.wait_ready()
    (pid,) = run.supervisor.pids().values()
    assert run.end() == 0
    wait_gone(pid)


def test_a_frontend_past_the_grace_gets_a_second_sigterm_before_sigkill(start: Start, tmp_path: Path) -> None:
    run = start(part("frontend-0", "twice", tmp_path / "told"), drain=0.5)
    run.wait_ready()
    began = time.monotonic()
    assert run.end() == 0
    assert 0.5 < time.monotonic() - began < 2.5
    assert (tmp_path / "told").read_text() == "told twice"


def test_nothing_that_happens_waits_for_a_look_at_the_clock(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "POLL_INTERVAL", 60.0)
    run = start(part("scheduler-0", "serve"))
    run.wait_ready()
    os.kill(run.supervisor.pids()["scheduler-0"], signal.SIGKILL)
    run.wait(lambda: sum("scheduler-0 is ready" in line for line in run.screen.lines) == 2)
    began = time.monotonic()
    assert run.end() == 0
    assert time.monotonic() - began < 10.0


def test_a_second_stop_waits_for_nobody(start: Start) -> None:
    run = start(part("frontend-0", "stubborn"))
    run.wait_ready()
    began = time.monotonic()
    run.supervisor.stop()
    run.supervisor.stop()
    run.thread.join(30)
    assert run.code == 130
    assert time.monotonic() - began < 3.0


def test_what_a_dead_part_had_started_is_killed_with_it(start: Start, tmp_path: Path) -> None:
    run = start(part("scheduler-0", "parent", tmp_path / "pid"))
    run.wait_ready()
    run.wait(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    child = int((tmp_path / "pid").read_text())
    assert is_alive(child)
    (tmp_path / "pid").unlink()
    os.kill(run.supervisor.pids()["scheduler-0"], signal.SIGKILL)
    wait_gone(child)
