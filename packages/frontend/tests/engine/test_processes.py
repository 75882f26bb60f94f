"""End of engines: with their program, by garbage collection, during answers, but not in a fork."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path

import pytest

from packages.frontend.tests.engine.test_engine import echo_parts
from tercet.frontend.engine.engine import Engine, EngineError

PROGRAM = Path(__file__).parents[1] / "parts" / "engine_program.py"
LONG = {"max_new_tokens": 4000}


def run_program(how: str) -> tuple[list[int], list[str], str]:
    """Return the ids of its parts, the other lines it printed, and its stderr without output of the parts."""
    done = subprocess.run([sys.executable, str(PROGRAM), how], capture_output=True, text=True, timeout=60, check=False)
    pids, *lines = done.stdout.splitlines()
    errors = [line for line in done.stderr.splitlines() if not line.startswith("tercet: ")]
    return [int(pid) for pid in pids.split()], lines, "\n".join(errors)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def runs(pid: int) -> bool:
    """Return whether a process runs; zombies do not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # ProcessLookupError if it ends between opening and reading
        return False


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(make_parts=echo_parts(step=0.02)) as started:
        yield started


def test_a_program_that_never_closes_its_engine_ends_without_a_word() -> None:
    pids, lines, errors = run_program("leave_it")
    assert len(pids) == 2
    assert (lines, errors) == ([], "")
    assert not any(map(runs, pids))


def test_parts_end_with_a_killed_program_whose_fork_lives_on() -> None:
    pids, [fork], _ = run_program("be_killed_after_a_fork")
    try:
        wait_until(lambda: not any(map(runs, pids)))
        assert runs(int(fork))
    finally:
        os.kill(int(fork), signal.SIGKILL)


def test_a_fork_is_told_so_and_leaves_the_engine_to_its_owner() -> None:
    pids, lines, errors = run_program("use_it_in_a_fork")
    assert lines == ["this process is a fork of the one that made the engine: make one here", " one two"]
    assert errors == ""
    assert not any(map(runs, pids))


def test_a_forgotten_engine_ends() -> None:
    engine = Engine(make_parts=echo_parts())
    pids = list(engine.supervisor.pids().values())
    assert all(map(runs, pids))
    del engine
    gc.collect()
    wait_until(lambda: not any(map(runs, pids)))


def test_an_engine_whose_terminal_is_stopped_answers_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()

    class StoppedTerminal(StringIO):
        def write(self, text: str) -> int:
            goes_on.wait()
            return super().write(text)

    monkeypatch.setattr("sys.stderr", StoppedTerminal())
    try:
        with Engine(make_parts=echo_parts()) as engine:
            assert engine.generate("one", {"max_new_tokens": 1})["text"] == " one"
    finally:
        goes_on.set()


def test_an_engine_is_not_forgotten_while_it_answers() -> None:
    answers = Engine(make_parts=echo_parts()).generate("one two", {"max_new_tokens": 3}, stream=True)
    gc.collect()
    *_, last = answers
    assert last["text"] == " one two one"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cancelled_task_is_cancelled_and_nothing_runs_on(engine: Engine, stream: bool) -> None:
    async def ask() -> None:
        answers = await engine.async_generate("one", LONG, stream=stream)
        async for _ in answers:
            pass

    task = asyncio.create_task(ask())
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(wait_until, lambda: engine._client._manager.running == 0)


def test_a_stream_that_is_left_is_aborted(engine: Engine) -> None:
    for _ in engine.generate("one", LONG, stream=True):
        break
    wait_until(lambda: engine._client._manager.running == 0)


async def test_whoever_awaits_an_answer_learns_that_the_engine_is_shut_down(engine: Engine) -> None:
    whole = asyncio.create_task(engine.async_generate("one", LONG))
    stream = await engine.async_generate("one", LONG, stream=True)
    await anext(stream)
    await asyncio.to_thread(engine.shutdown)
    with pytest.raises(EngineError, match="shut down"):
        await whole
    with pytest.raises(EngineError, match="shut down"):
        await anext(stream)


def test_a_stream_that_outlives_its_engine_goes_without_a_word(engine: Engine) -> None:
    stream = engine.generate("one", LONG, stream=True)
    next(stream)
    engine.shutdown()
    del stream  # an exception of a generator is then a warning, and warnings are errors here
    gc.collect()


def test_two_threads_may_shut_an_engine_down_and_others_may_ask_meanwhile(engine: Engine) -> None:
    outcomes: list[str] = []

    def ask() -> None:
        try:
            while True:
                engine.generate("one", {"max_new_tokens": 1})
        except EngineError as error:
            outcomes.append(str(error))

    asking = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
    pids = list(engine.supervisor.pids().values())
    ending = [threading.Thread(target=engine.shutdown, daemon=True) for _ in range(2)]
    for thread in asking + ending:
        thread.start()
    for thread in asking + ending:
        thread.join(20)
    assert outcomes == ["the engine is shut down"] * 4
    assert not any(map(runs, pids))
