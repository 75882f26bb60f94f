"""Order of the stages for a number of minutes."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the stages need it")

from tools import gpu_check
from tools.gpu_check import SERVED_STAGES, STAGES, in_time
from tools.gpu_stages.records import write
from tools.gpu_stages.schedule import TURNS, next_turn, planned

NAMES = [*STAGES, *SERVED_STAGES]
SECONDS = {turn.stage: turn.expected for turn in TURNS}


def test_every_stage_has_one_turn() -> None:
    assert sorted(SECONDS) == sorted(NAMES)
    assert len(SECONDS) == len(TURNS)


def test_a_quarter_of_an_hour_has_the_most_wanted_records() -> None:
    stages = [turn.stage for _, turn in planned(NAMES, 15)]
    assert stages[:5] == ["correctness", "prefill", "quantised_times", "mixtures", "torch_kernels"]
    assert sum(SECONDS[stage] for stage in stages) <= 15 * 60


def test_a_short_stage_takes_the_time_that_a_long_one_would_not_fit_into() -> None:
    stages = [turn.stage for _, turn in planned(["mixtures", "weights", "prefill"], 1)]
    assert stages == ["prefill", "weights"]
    assert next_turn(["mixtures"], SECONDS["mixtures"]) is None


def test_the_plan_says_when_each_stage_begins(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--plan", "3.2", "--stage", "prefill", "mixtures", "correctness"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[1:3]] == [["0:00", "correctness", "142"], ["2:22", "prefill", "22"]]
    assert lines[3].split()[0] == "2:44"
    assert lines[4] == "no room: mixtures"


def test_a_run_takes_what_fits_into_the_time_that_is_left() -> None:
    """Stages take longer than expected, so that the last one has no time."""
    now = [0.0]
    taken = []
    for stage, limit in in_time(["prefill", "correctness", "step", "launches"], 4, lambda: now[0]):
        taken.append((stage, limit))
        now[0] += SECONDS[stage] + 25
    assert taken == [("correctness", 235), ("prefill", 68), ("launches", 21)]


def test_a_stage_has_no_more_than_its_limit() -> None:
    assert [limit for _, limit in in_time(["step"], 60, lambda: 0.0)] == [gpu_check.LIMIT]


def test_the_next_run_leaves_out_what_the_bundle_has(tmp_path: Path) -> None:
    def record(stage: str, *, complete: bool) -> dict[str, Any]:
        known = {"machine": {"gpu 0": "x"}, "date": "2026-11-26", "results": {}}
        return known | {"stage": stage, "complete": complete}

    bundle = tmp_path / "bundle.json"
    assert gpu_check._missing(NAMES, bundle) == NAMES
    write(record("decode", complete=True), tmp_path, bundle)
    write(record("mixtures", complete=False), tmp_path, bundle)
    assert gpu_check._missing(["decode", "mixtures", "step"], bundle) == ["mixtures", "step"]
    assert gpu_check._missing(["decode"], None) == ["decode"]


def test_a_reader_may_have_enough_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `head` has, which closes the pipe."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert gpu_check.main(["--plan"]) == 0
        closed.write("more, as the interpreter flushes at exit")
