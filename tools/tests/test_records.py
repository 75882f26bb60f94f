"""Tests of records of stages: their content, their files, and the correctness that they state."""

import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from tools.gpu_stages import kernels

pytest.importorskip("triton", reason="the stages need it")

from tools import gpu_check
from tools.gpu_stages.records import by_device, read, read_file, shows_equality, trouble_of, write
from tools.gpu_stages.scale import Results, Scale
from tools.gpu_stages.table import table
from tools.tests.tiny import TINY, make_engine

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("short_stages")

READY = "| ready after start, 8B with random weights, warm caches | < 20 s |"


def record(stage: str, results: Results, *, date: str = "2026-11-22", gpu: str = "NVIDIA H200, sm90") -> Results:
    return {"stage": stage, "date": date, "machine": {"gpu 0": gpu}, "complete": True, "results": results}


def correctness(**words: str) -> Results:
    checks = {"rmsnorm": "ok", **words}
    wrong = [name for name, word in checks.items() if word not in ("ok", "not run")]
    return record("correctness", {"checks": checks, "wrong": wrong, "architecture": "cpu"})


def test_a_stage_that_is_cut_off_keeps_what_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(scale: Scale) -> Iterator[Results]:
        yield {"first": 1}
        raise KeyboardInterrupt

    monkeypatch.setitem(gpu_check.STAGES, "decode", breaks)
    with pytest.raises(KeyboardInterrupt):
        gpu_check.run_stage("decode", TINY, make_engine, tmp_path / "out", tmp_path / "all")
    (path,) = (tmp_path / "out").iterdir()
    [kept] = read_file(path)
    assert read_file(tmp_path / "all") == [kept]
    assert kept["results"] == {"first": 1}
    assert not kept["complete"]


def test_a_stage_that_ends_before_it_measures_leaves_no_older_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(scale: Scale) -> Iterator[Results]:
        raise MemoryError

    gpu_check.run_stage("machine", TINY, make_engine, tmp_path)
    monkeypatch.setattr(kernels, "ceilings_of", breaks)
    with pytest.raises(MemoryError):
        gpu_check.run_stage("machine", TINY, make_engine, tmp_path)
    [[kept]] = [[*records.values()] for records in read(tmp_path).values()]
    assert not kept["complete"]
    assert kept["results"] == {}


def test_a_bundle_is_read_as_the_files_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, again, bundle = tmp_path / "out", tmp_path / "again", tmp_path / "out" / "all.json"
    given = [
        record("ready", {"warm_s": 9.0}),
        record("ready", {"warm_s": 8.0}, gpu="NVIDIA H100"),
        record("machine", {}),
        record("ready", {"warm_s": 7.0}, date="2026-11-23"),
    ]
    for each in given:
        write(each, out, bundle)
    (out / "another.json").write_text('{"no": "record"}')
    assert read_file(bundle) == given[1:]
    assert gpu_check.main(["--unbundle", str(bundle), "--out", str(again)]) == 0
    names = ["nvidia-h100-ready.json", "nvidia-h200-machine.json", "nvidia-h200-ready.json"]
    assert sorted(path.name for path in again.iterdir()) == names
    assert sorted(capsys.readouterr().out.split()) == [str(again / name) for name in names]
    assert read(again) == read(out) == by_device(given[1:])
    said = []
    for where in (["--bundle", str(bundle)], ["--out", str(again)]):
        assert gpu_check.main(["--table", *where]) == 0
        said.append(sorted(capsys.readouterr().out.splitlines()))
    assert said[0] == said[1]
    assert f"{READY} 7.0 s | yes |" in said[0]
    assert gpu_check.main(["--table", "--bundle", str(tmp_path / "none")]) == 2


def test_of_two_records_of_a_stage_the_later_one_counts(tmp_path: Path) -> None:
    write(record("ready", {"warm_s": 9.0}, date="2026-11-23"), tmp_path)
    (tmp_path / "before.json").write_text(json.dumps([record("ready", {"warm_s": 8.0})]))
    (tmp_path / "older.json").write_text(json.dumps([record("ready", {"warm_s": 7.0}, date="2026-11-21")]))
    assert read(tmp_path)["nvidia-h200"]["ready"]["results"] == {"warm_s": 9.0}


@pytest.mark.parametrize(
    ("known", "trouble"),
    [
        (correctness(philox="ValueError: no"), "wrong: philox"),
        (correctness(philox="ValueError: no", rope="not run"), "wrong: philox; 1 not run"),
        (correctness(rope="not run") | {"complete": False}, "1 not run; cut off"),
        (correctness() | {"complete": False, "results": {}}, "cut off"),
        (correctness(), ""),
    ],
)
def test_what_is_measured_where_kernels_are_wrong_says_so(known: Results, trouble: str, tmp_path: Path) -> None:
    """Each record says so, and the table beside each of its figures."""
    assert trouble_of(known) == trouble
    known["machine"] = {"gpu": "none"}
    write(known, tmp_path)
    kept = gpu_check.run_stage("ready", TINY, make_engine, tmp_path)
    assert kept["correctness"] == {"date": "2026-11-22", "trouble": trouble}
    said = table(read(tmp_path)["none"]).splitlines()
    assert said[0] == (
        f"**Correctness failed, 2026-11-22: {trouble}.**" if trouble else "| work | target | measured | reached |"
    )
    [line] = [line for line in said if line.startswith(READY)]
    assert ("s (correctness failed) | yes |" in line) == bool(trouble)
    assert table({"ready": kept}).startswith("**") == bool(trouble)


def test_where_nothing_is_known_of_correctness_nothing_is_said(tmp_path: Path) -> None:
    kept = gpu_check.run_stage("ready", TINY, make_engine, tmp_path)
    assert kept["correctness"] is None
    assert table({"ready": kept}).startswith("| work |")


def test_what_verified_json_says_is_shown_by_its_files() -> None:
    verified = json.loads(resources.files("tercet.kernels.attention").joinpath("verified.json").read_text())
    for backend, files in verified.items():
        for architecture, name in files.items():
            [kept] = read_file(ROOT / name)
            assert shows_equality(kept, backend, architecture), name


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"stage": "model"},
        {"complete": False},
        {"wrong": ["philox"]},
        {"architecture": "sm80"},
        {"grid": "not here: no flashinfer"},
    ],
)
def test_only_a_whole_and_right_record_shows_equality(change: dict[str, Any]) -> None:
    given: dict[str, Any] = {
        "stage": "correctness",
        "complete": True,
        "wrong": [],
        "architecture": "sm90",
        "grid": "ok",
    }
    given |= change
    results = {"wrong": given["wrong"], "architecture": given["architecture"]}
    results["checks"] = {"grid flashinfer": given["grid"]}
    kept = {"stage": given["stage"], "complete": given["complete"], "results": results}
    assert shows_equality(kept, "flashinfer", "sm90") == (not change)
