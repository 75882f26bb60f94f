"""Tests of the stage `tuning`: wrong variants, and times."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton", reason="these are Triton's kernels")

from tercet.kernels.triton import embedding, missing_triton
from tercet.kernels.triton.attention import rope
from tercet.kernels.triton.launch import Tiling
from tercet.kernels.triton.sampling import argmax, sampling
from tools.gpu_stages import tuning
from tools.gpu_stages.scale import Results
from tools.tests.tiny import CPU, TINY

pytestmark = pytest.mark.skipif(bool(missing_triton(CPU)), reason=missing_triton(CPU))


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace each measurement by one call."""

    def once(run: Callable[[], object], *_: object) -> float:
        run()
        return 1.0

    monkeypatch.setattr(tuning, "measure_recorded", once)


def test_a_way_that_is_wrong_is_found_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One variant draws another token, one stores no values, and one does not run."""
    sample, look_up = sampling.sample, embedding.embedding
    rope_store: Any = rope.rope_store

    def other(*given: Any, tiling: Tiling) -> Any:
        return sample(*given, tiling=tiling) ^ (tiling.block == 4096)

    def forgets(*given: Any, tiling: Tiling) -> Any:
        *before, values, slots = given
        stored = values.clone() if tiling == Tiling(8, 4) else values
        return rope_store(*before, stored, slots, tiling=tiling)

    def breaks(*given: Any, tiling: Tiling) -> Any:
        if tiling.warps == 16:
            raise ValueError("too many warps")
        return look_up(*given, tiling=tiling)

    some = ("embedding", "rope_store", "largest", "sample all")
    monkeypatch.setattr(tuning, "OPERATIONS", {name: tuning.OPERATIONS[name] for name in some})
    monkeypatch.setattr(sampling, "sample", other)
    monkeypatch.setattr(rope, "rope_store", forgets)
    monkeypatch.setattr(embedding, "embedding", breaks)
    results: Results = {}
    for part in tuning.tuning(TINY):
        results |= part
    assert results["wrong"] == ["embedding 8192 x 16", "rope_store 8 x 4", "sample all 4096 x 8"]
    assert results["checks"]["embedding 8192 x 16"] == "batch 1: ValueError: too many warps"
    assert results["checks"]["sample all 4096 x 8"].startswith("batch 1: AssertionError")
    assert "8192 x 16" not in {row["tiling"] for row in results["embedding"]["batch 1"]}
    assert len(results["largest"]["batch 1"]) == len(argmax.TILINGS)


@pytest.mark.slow
def test_other_processes_check_and_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes do not have the replacements of this test."""
    ways = embedding.TILINGS[:2]
    monkeypatch.setattr(tuning, "OPERATIONS", {"embedding": (ways, tuning.OPERATIONS["embedding"][1])})
    parts = [json.loads(json.dumps(part)) for part in tuning.tuning(replace(TINY, batches=(), processes=2))]
    assert parts[0] == {"checks": dict.fromkeys((f"embedding {way}" for way in ways), "not run"), "wrong": []}
    assert parts[2] == {"checks": dict.fromkeys((f"embedding {way}" for way in ways), "ok"), "wrong": []}
    assert parts[3] == {"embedding": {"trouble": "not run"}}
    [(size, rows)] = parts[-1]["embedding"].items()
    assert size == "16 tokens"
    assert {row["tiling"] for row in rows} == set(map(str, ways))
    assert all(0 < row["us"] != 1e6 for row in rows)


def test_the_fastest_way_comes_first(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = iter([0.5, 0.25, 1.0])
    monkeypatch.setattr(tuning, "measure_recorded", lambda *_: next(seconds))
    ways = embedding.TILINGS[:3]
    monkeypatch.setattr(tuning, "OPERATIONS", {"embedding": (ways, tuning.OPERATIONS["embedding"][1])})
    *_, last = tuning.tuning(replace(TINY, batches=()))
    rows = last["embedding"]["16 tokens"]
    assert [row["tiling"] for row in rows] == [str(ways[place]) for place in (1, 0, 2)]
    assert [row["us"] for row in rows] == [250_000, 500_000, 1_000_000]
    assert [line.endswith("in use") for line in capsys.readouterr().out.splitlines()] == [False, False, True, False]
