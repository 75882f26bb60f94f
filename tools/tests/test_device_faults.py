"""Tests of a stage in which the device fails: the failing check, and the checks that were not run."""

import json
from typing import Any

import pytest

pytest.importorskip("triton", reason="the GPU path needs it")

from tercet.kernels.tools.check import OPS
from tercet.kernels.tools.verification import Case
from tercet.kernels.triton import missing_triton
from tools.gpu_stages import kernels, quantised
from tools.gpu_stages.table import table
from tools.tests.tiny import CPU, TINY, failing

pytestmark = [
    pytest.mark.skipif(bool(missing_triton(CPU)), reason=missing_triton(CPU)),
    pytest.mark.usefixtures("short_stages"),
]


def test_an_operation_in_which_the_device_fails_is_the_one_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage runs without other processes; earlier checks stay right."""
    monkeypatch.setitem(OPS, "philox", failing)
    parts = [json.loads(json.dumps(part)) for part in kernels.correctness(TINY)]
    assert set(parts[0]["checks"].values()) == {"not run"}
    results = parts[-1]
    assert results["wrong"] == ["philox"]
    assert results["checks"]["philox"] == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert results["checks"]["rmsnorm"] == "ok"
    assert results["checks"]["bitmask"] == results["checks"]["grid triton"] == "not run"
    missing = sum(word == "not run" for word in results["checks"].values())
    assert f"| wrong: philox; {missing} not run | **no** |" in table(
        {"correctness": {"results": results, "complete": True, "date": ""}}
    )


def test_a_case_of_a_grid_in_which_the_device_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    run, cases = Case.run, list[Case]()

    def breaks(case: Case, *given: Any) -> Any:
        cases.append(case)
        return failing() if len(cases) == 2 else run(case, *given)

    monkeypatch.setattr(Case, "run", breaks)
    *_, results = kernels.correctness(TINY)
    assert results["wrong"] == ["grid triton"]
    assert results["checks"]["grid triton"].startswith(f"{cases[1]}: RuntimeError: CUDA error")
    assert results["checks"]["grid flashinfer"] == "not run"


def test_a_form_that_fails_on_the_device_is_distinct_from_one_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = {name: quantised._COMPARED[name] for name in ("full", "awq", "gptq")}
    monkeypatch.setattr(quantised, "_COMPARED", forms)
    compared = quantised._compared
    monkeypatch.setattr(
        quantised, "_compared", lambda form, *given: failing() if form.kind == "awq" else compared(form, *given)
    )
    *_, results = quantised.compare(TINY)
    assert results["wrong"] == ["awq"]
    assert results["compared"]["full"]["right"]
    assert results["compared"]["gptq"] == {"trouble": "not run"}
    said = table({"quantised": {"results": results, "complete": True}})
    assert "| wrong: awq; 1 not run | **no** |" in said
