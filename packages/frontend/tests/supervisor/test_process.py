import queue
import signal
import sys
import threading
from pathlib import Path

import pytest

from tercet.frontend.supervisor.parts import LaunchSpec
from tercet.frontend.supervisor.process import ChildProcess
from tercet.protocol.messages.values import Role


def run(code: str) -> tuple[int, str]:
    """Return the exit code and the last error of a part that runs this code."""
    exits: queue.Queue[tuple[int, str]] = queue.Queue()
    part = LaunchSpec("scheduler-0", Role.SCHEDULER, (sys.executable, "-c", code))
    ChildProcess(part, (), socket_fd=None, on_line=lambda _: None, on_exit=lambda *how: exits.put(how))
    return exits.get(timeout=20)


def children() -> set[str]:
    return {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


def test_last_words_are_those_that_may_say_what_is_wrong() -> None:
    lines = ["Traceback:", "MemoryError: no room", "2026-11-23 10:33:52,542 INFO torch.cache: misses: 0", ""]
    assert run(f"import sys; print({chr(10).join(lines)!r}); sys.exit(3)") == (3, "MemoryError: no room")
    warning = "2026-11-23 10:33:52,542 WARNING tercet: it leaves"
    assert run(f"import sys; print({warning!r}); sys.exit(3)") == (3, warning)


def test_last_words_of_a_json_log_are_its_message() -> None:
    fault = '{"time":"t","level":"CRITICAL","message":"no  room","exception":"Traceback"}'
    news = '{"time":"t","level":"INFO","message":"\\"level\\":\\"ERROR\\""}'
    assert run(f"import sys; print({fault!r}); print({news!r}); sys.exit(3)") == (3, "no room")


def test_last_words_of_a_fault_in_native_code_name_it() -> None:
    code = "import faulthandler, os, signal, sys; print('profiler_stop'); faulthandler.enable(1); sys.stdout.flush(); "
    code += "os.kill(os.getpid(), signal.SIGSEGV)"
    assert run(code) == (-signal.SIGSEGV, "Fatal Python error: Segmentation fault")


def test_why_it_ends_is_told_once_with_its_end() -> None:
    said: list[str] = []
    exits: queue.Queue[tuple[int, str]] = queue.Queue()
    code = "print('tercet-scheduler: not yet'); print('news'); print('tercet-scheduler: no  room'); raise SystemExit(2)"
    part = LaunchSpec("scheduler-0", Role.SCHEDULER, (sys.executable, "-c", code))
    ChildProcess(part, (), socket_fd=None, on_line=said.append, on_exit=lambda *how: exits.put(how))
    assert exits.get(timeout=20) == (2, "no room")
    assert said == ["tercet-scheduler: not yet", "news"]


def test_a_process_that_no_thread_can_watch_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = children()
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(OSError, match="can't start new thread"):
        run("import time; time.sleep(60)")
    assert children() == before


@pytest.mark.parametrize(("role", "words"), [(Role.SCHEDULER, "dumped"), (Role.DETOKENIZER, "")])
def test_a_hung_scheduler_may_write_its_last_events_before_it_is_killed(role: Role, words: str) -> None:
    exits: queue.Queue[tuple[int, str]] = queue.Queue()
    ready = threading.Event()
    code = "import os, signal, time; signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b'dumped\\n'))"
    code += "; print('INFO', flush=True); time.sleep(60); time.sleep(60)"
    process = ChildProcess(
        LaunchSpec("part-0", role, (sys.executable, "-c", code)),
        (),
        socket_fd=None,
        on_line=lambda _: ready.set(),
        on_exit=lambda *how: exits.put(how),
    )
    assert ready.wait(20)
    process.kill_hung()
    assert exits.get(timeout=20) == (-signal.SIGKILL, words or "INFO")
