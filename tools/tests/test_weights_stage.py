"""Tests that the stage of weight updates finds errors, with CUDA graphs, in Triton's interpreter on the CPU."""

from typing import Any

import pytest

pytest.importorskip("triton", reason="the GPU path needs it")

from tercet.kernels.triton import missing_triton
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tools.gpu_stages import weights
from tools.tests.test_adapters_stage import SCALE, Tape, with_graphs
from tools.tests.tiny import CPU

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing_triton(CPU)), reason=missing_triton(CPU))]


def replaced() -> dict[str, Any]:
    *_, part = weights.weights(SCALE)
    assert part["wrong"] == ([] if part["replaced"].get("right") else ["replaced"])
    result: dict[str, Any] = part["replaced"]
    return result


def test_other_weights_are_those_of_new_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    tape = Tape()
    with_graphs(monkeypatch, tape)
    result = replaced()
    assert result["right"], result
    assert tape.recorded == [3, 2, 1] * 4  # of three workers, the last of them twice
    assert len(tape.replayed) == 4 * 7


def test_graphs_of_old_weights_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with_graphs(monkeypatch, Tape())
    change = TpModelWorker._change

    def keep(self: TpModelWorker, *given: Any) -> str:
        graphs = self._runner.graphs
        fault = change(self, *given)
        self._runner.graphs = graphs
        return fault

    monkeypatch.setattr(TpModelWorker, "_change", keep)
    assert not replaced()["right"]


def test_weights_that_stay_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TpModelWorker, "_change", lambda *_: "")
    result = replaced()
    assert not result["right"]
    assert result["far"] == pytest.approx(result["moved"], rel=0.1)
