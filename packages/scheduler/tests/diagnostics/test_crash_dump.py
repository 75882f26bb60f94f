"""Dumps of the last events: replayed if they are complete, and without a token unless asked."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tercet.protocol.messages.values import Grammar, GrammarKind, pack_ints
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.events import Arrival
from tercet.scheduler.core.scheduler import Scheduler
from tercet.scheduler.diagnostics import crash_dump
from tercet.scheduler.diagnostics.crash_dump import EventRing
from tercet.scheduler.diagnostics.event_log import (
    Committed,
    Excerpt,
    RecordingScheduler,
    Scheduled,
    Started,
    read_events,
    replay,
)
from tercet.scheduler.testing import FakeExecutor, request, small_capacity
from tools.replay import main

SECRET = [41, 43, 47, 41, 43, 47, 41, 43]


def run(ring: EventRing, steps: int = 12) -> None:
    """Serve a request of secret tokens, with a grammar whose text is a secret, too."""
    shape = small_capacity(grammars="fake 1")
    core, executor = RecordingScheduler(Scheduler(CoreConfig(token_budget=5), shape), ring.record), FakeExecutor(shape)
    grammar = Grammar(GrammarKind.REGEX, "secret-pattern")
    prompt = request("r", SECRET, salt="secret-salt", prediction=SECRET, max_new_tokens=40, grammar=grammar)
    core.handle(Arrival("frontend-0", msgspec.structs.replace(prompt, decode_spec=b"secret-stop")))
    for _ in range(steps):
        if plan := core.schedule(1.5):
            core.commit(executor.submit(plan).result())


def dump_of(state: Path) -> Path:
    [path] = (state / "crashes").iterdir()
    assert path.stat().st_mode & 0o077 == 0
    return path


def test_a_full_dump_with_all_events_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ring = EventRing(lambda: tmp_path, "scheduler/0", redacted=False)
    run(ring)
    ring.write("KeyError: 'x'")
    path = dump_of(tmp_path)
    with path.open("rb") as file:
        plans = [(logged, derived) for _, logged, derived in replay(read_events(file))]
    assert sum(logged is not None for logged, _ in plans) > 5
    assert all(logged == derived for logged, derived in plans)
    assert main(path) == 0
    assert "every one derived again" in capsys.readouterr().out


@pytest.mark.parametrize("redacted", [False, True])
def test_only_the_last_events_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redacted: bool) -> None:
    monkeypatch.setattr(crash_dump, "_MOST_EVENTS", 5)
    ring = EventRing(lambda: tmp_path, "scheduler-0", redacted=redacted)
    run(ring)
    ring.write("stopped")
    with dump_of(tmp_path).open("rb") as file:
        started, excerpt, *events = read_events(file)
    assert isinstance(started, Started)
    assert excerpt == Excerpt(1 + 2 * 12 - 5, redacted, "stopped")
    assert len(events) == 5
    with dump_of(tmp_path).open("rb") as file, pytest.raises(ValueError, match="an excerpt cannot be replayed"):
        list(replay(read_events(file)))


def test_requests_of_few_bytes_only_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these prompts is in two events: its arrival, and the plan that admits it."""
    monkeypatch.setattr(crash_dump, "_MOST_BYTES", 4 * 4 * len(SECRET) + 100)
    ring = EventRing(lambda: tmp_path, "scheduler-0", redacted=True)
    for _ in range(9):
        run(ring, steps=3)
    ring.write("stopped")
    with dump_of(tmp_path).open("rb") as file:
        prompts = [
            event for event in read_events(file) if isinstance(event, Scheduled) and event.plan and event.plan.introduce
        ]
    assert 1 <= len(prompts) <= 2


def test_a_redacted_dump_has_lengths_and_times_and_no_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = EventRing(lambda: tmp_path / "plain", "scheduler-0", redacted=False)
    ring = EventRing(lambda: tmp_path / "redacted", "scheduler-0", redacted=True)
    for each in (plain, ring):
        run(each)
        each.write("RuntimeError: out of pages")
    known, path = dump_of(tmp_path / "plain"), dump_of(tmp_path / "redacted")
    with known.open("rb") as file:
        told = [event for event in read_events(file) if isinstance(event, Committed)]
    secrets = [b"secret", msgspec.json.encode(pack_ints(SECRET)).strip(b'"')]
    secrets += [f"[{each.result.token_ids[0]}]".encode() for each in told if each.result.token_ids[0] > 0]
    assert all(secret in known.read_bytes() for secret in secrets)
    assert not [secret for secret in secrets if secret in path.read_bytes()]
    with path.open("rb") as file:
        steps = [event for event in read_events(file) if isinstance(event, Scheduled) and event.plan]
    assert len(steps) > 5
    assert steps[0].plan is not None
    assert [len(each.tokens) // 4 for each in steps[0].plan.introduce] == [len(SECRET)]
    assert main(path) == 0
    output = capsys.readouterr().out
    assert "RuntimeError: out of pages" in output
    assert "arrived: TokenizedGenerateReqInput r" in output
    assert "introduce slot 0: 8 tokens; rows 0:0+8" in output


def test_the_newest_dumps_are_kept_and_an_error_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(crash_dump, "_MOST_FILES", 2)
    for peer in "abc":
        ring = EventRing(lambda: tmp_path, peer, redacted=True)
        run(ring)
        ring.write("signal")
        os.utime(next((tmp_path / "crashes").glob(f"{peer}-*")), (ord(peer), ord(peer)))
    assert sorted(path.name[0] for path in (tmp_path / "crashes").iterdir()) == ["b", "c"]
    (tmp_path / "file").touch()
    ring = EventRing(lambda: tmp_path / "file", "a", redacted=True)
    run(ring)
    ring.write("signal")
    assert "crash dump: not written: error=" in caplog.text


CRASHES = """
import sys
from tercet.scheduler.__main__ import main
from tercet.scheduler.core.scheduler import Scheduler

def fail(self, now=0.0):
    raise RuntimeError("broken invariant")

if sys.argv.pop(1) == "fail":
    Scheduler.load = fail
main()
"""


@pytest.mark.parametrize("kind", ["fail", "signal"])
def test_a_scheduler_writes_one_when_it_dies_and_on_a_signal(
    kind: str, checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", CRASHES, kind, "--listen", f"ipc://{tmp_path}/s", "--peer", "scheduler-0"]
    command += ["--model", str(checkpoints("llama")), "--executor", "fake", "--state-dir", str(tmp_path / "state")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("state/crashes/*.jsonl")):
            assert time.monotonic() < deadline
            time.sleep(0.1)
            if kind == "signal" and list(tmp_path.glob("s*")):  # it listens, and so it handles signals
                process.send_signal(signal.SIGUSR1)
        alive = process.poll() is None
        process.kill() if kind == "signal" else process.wait(60)
    with next((tmp_path / "state" / "crashes").glob("*.jsonl")).open("rb") as file:
        _, excerpt, *_ = read_events(file)
    assert isinstance(excerpt, Excerpt)
    assert excerpt.reason == ("signal" if kind == "signal" else "RuntimeError: broken invariant")
    assert alive or kind == "fail"
