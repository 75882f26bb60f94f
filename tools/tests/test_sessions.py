"""Tests that processes of a stage end with it, and that a failing stage ends no other."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the stages need it")

from tools import gpu_check
from tools.gpu_stages.sessions import run_apart

OTHER = "(echo here; exec sleep 600) > {} &"
"""Command that starts another process, which holds the pipe open while it lives."""


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """Yield the path of a pipe, and its end to read from."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(end, True)
    yield path, end
    os.close(end)


def everything(end: int) -> bytes:
    """Return all bytes that are written until no process holds the pipe."""
    return b"".join(iter(lambda: os.read(end, 100), b""))


@pytest.mark.parametrize("group", ["its", "another"])
def test_who_is_not_done_in_time_is_killed_and_all_it_started(group: str, pipe: tuple[Path, int]) -> None:
    path, end = pipe
    begin = "set -m; " if group == "another" else ""
    assert run_apart(["bash", "-c", f"{begin}{OTHER.format(path)} exec sleep 600"], 3.0) is None
    assert everything(end) == b"here\n"


def test_what_a_command_leaves_behind_is_killed(pipe: tuple[Path, int]) -> None:
    path, end = pipe
    assert run_apart(["bash", "-c", f"{OTHER.format(path)} exit 3"], 60.0) == 3
    assert everything(end) in (b"here\n", b"")


class Runs:
    """Fake runner: exit codes by stage, the stages that ran, and the other arguments."""

    def __init__(self, **codes: int | None) -> None:
        self.codes = codes
        self.stages: list[str] = []
        self.told: set[tuple[str, ...]] = set()

    def __call__(self, command: Sequence[str], limit: float) -> int | None:
        assert limit == gpu_check.LIMIT
        place = command.index("--stage") + 1
        self.stages.append(command[place])
        self.told.add(tuple(command[place + 1 :]))
        return self.codes.get(command[place], 0)


STAGES = ["machine", "correctness", "decode"]
LIMITED = [(stage, gpu_check.LIMIT) for stage in STAGES]


@pytest.mark.parametrize("stop", [False, True])
def test_correctness_that_is_right_fails_for_no_other_stage(
    stop: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Runs(machine=1)
    monkeypatch.setattr(gpu_check, "run_apart", runs)
    assert gpu_check.run_stages(LIMITED, tmp_path, None, stop=stop) == 1
    assert runs.stages == STAGES
    assert runs.told == {("--out", str(tmp_path))}
    assert "correctness" not in capsys.readouterr().err


@pytest.mark.parametrize("code", [1, -9, None])
@pytest.mark.parametrize("stop", [False, True])
def test_measuring_after_failed_correctness_is_an_option(
    code: int | None, stop: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Runs(correctness=code)
    monkeypatch.setattr(gpu_check, "run_apart", runs)
    assert gpu_check.run_stages(LIMITED, tmp_path, tmp_path / "all.json", stop=stop) == 1
    assert runs.stages == (STAGES[:2] if stop else STAGES)
    assert runs.told == {("--out", str(tmp_path), "--bundle", str(tmp_path / "all.json"))}
    said = capsys.readouterr().err
    assert ("correctness: not done after 540 s" in said) == (code is None)
    assert f"correctness failed: {'the rest is not measured' if stop else 'the records of what follows say so'}" in said


def test_stages_that_are_all_right_are_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "run_apart", Runs())
    assert gpu_check.run_stages(LIMITED, tmp_path, None, stop=True) == 0
