"""Tests that the stage of adapters finds errors, with CUDA graphs and without, in Triton's interpreter on the CPU."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tercet.scheduler.executor import loading

pytest.importorskip("triton", reason="the GPU path needs it")

from tercet.kernels.attention.select import attention_backend
from tercet.kernels.attention.triton import TritonAttention
from tercet.kernels.triton import missing_triton
from tercet.scheduler.executor import tp_worker
from tercet.scheduler.executor.graphs.cuda_graphs import CudaGraphRunner
from tercet.scheduler.executor.kv_pool import KVPool
from tercet.scheduler.executor.lora.adapter_config import AdapterConfig
from tercet.scheduler.executor.lora.adapters import StepAdapters
from tercet.scheduler.executor.model_runner import ModelRunner
from tercet.scheduler.models.layers.layer_ops import TritonLayerOps
from tercet.scheduler.models.layers.lora import LoRABank
from tools.gpu_stages import adapters, executor
from tools.gpu_stages.scale import Results, Shape
from tools.gpu_stages.table import table
from tools.tests.tiny import CPU, TINY, failing

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing_triton(CPU)), reason=missing_triton(CPU))]


SCALE = replace(TINY, compared=Shape("LlamaForCausalLM", 32, 32, 1, 2, 1, 16, 32), compared_tokens=16)


class Tape:
    """Fake `Recorder` whose replay runs the work again, into the tensor of the first result."""

    def __init__(self, fails: int = 0) -> None:
        self.fails = fails
        self.recorded: list[int] = []
        self.replayed: list[int] = []
        """Rows of replays that return hidden states, without sampling and without launches that end a recording."""

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        output = run()
        rows = len(output)
        if rows == self.fails:
            raise torch.OutOfMemoryError
        self.recorded.append(rows)
        launched = False

        def replay() -> None:
            nonlocal launched
            if launched and output.ndim > 1:
                self.replayed.append(rows)
            launched = True
            output.copy_(run())

        return replay, output


def with_graphs(
    monkeypatch: pytest.MonkeyPatch, tape: Tape, *, decode_rows: int | None = None, chained_rows: int = 0
) -> None:
    """Make workers with attention `auto` as on a GPU."""

    def runner(model: Any, pool: KVPool, backend: Any, **more: Any) -> ModelRunner:
        if backend is TritonAttention:
            more["graphs"] = partial(
                CudaGraphRunner, model, pool, [backend], tape, decode_rows=decode_rows, chained_rows=chained_rows
            )
        return ModelRunner(model, pool, backend, **more)

    def chosen(name: str, device: torch.device) -> Any:
        return TritonAttention if name == "auto" else attention_backend(name, device)

    monkeypatch.setattr(tp_worker, "attention_backend", chosen)
    monkeypatch.setattr(tp_worker, "KVPool", lambda *given, **more: KVPool(*given, **more | {"spare": True}))
    monkeypatch.setattr(tp_worker, "ModelRunner", runner)
    monkeypatch.setattr(loading, "layer_ops", lambda _: TritonLayerOps())


def compared() -> Results:
    results: Results = {}
    for part in adapters.compare(SCALE):
        results |= part
    return results


def test_adapters_are_right_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker without adapters in use has graphs of steps without adapters; the other has twice as many."""
    tape = Tape()
    with_graphs(monkeypatch, tape)
    results = compared()
    assert results["wrong"] == []
    assert tape.recorded == [5, 4, 2, 1] * 3
    assert tape.replayed == [5, 5, 5, 4, 4, 4, 1] * 2


def test_graphs_that_read_no_adapters_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with_graphs(monkeypatch, Tape())
    monkeypatch.setattr(StepAdapters, "write_decode_rows", lambda *_: None)
    assert compared()["wrong"] == ["first", "second"]


def test_decodes_with_adapters_that_are_not_replayed_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """All graphs exist, but only the last decode is of a request without an adapter."""
    kind_of = CudaGraphRunner._graph_key
    with_graphs(monkeypatch, Tape())
    monkeypatch.setattr(
        CudaGraphRunner, "_graph_key", lambda self, inputs, adapted: None if adapted else kind_of(self, inputs, adapted)
    )
    assert compared()["compared"]["all"]["trouble"].endswith("of 7 decodes only 1 were replayed from graphs")


def test_a_graph_that_cannot_be_recorded_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with_graphs(monkeypatch, Tape(fails=4))
    results = compared()
    assert results["wrong"] == ["all"]
    assert "of 4 graphs only 3 could be recorded" in results["compared"]["all"]["trouble"]


def test_an_adapter_that_is_not_applied_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoRABank, "install", lambda *_: None)
    results = compared()
    assert results["wrong"] == ["first", "second"]
    for name in ("first", "second"):
        assert results["compared"][name]["far"] == pytest.approx(results["compared"][name]["moved"], abs=1e-3)


def test_an_adapter_whose_scale_is_slightly_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    scale = AdapterConfig.scale
    monkeypatch.setattr(AdapterConfig, "scale", lambda *given: scale(*given) * 1.01)
    assert compared()["wrong"] == ["first", "second"]


def test_what_is_not_run_is_not_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cases are compared before the device fails."""
    merged = adapters._merged

    def breaks(directory: Path, *given: Any) -> Any:
        return merged(directory, *given) if "first" in directory.name else failing()

    monkeypatch.setattr(adapters, "_merged", breaks)
    results = compared()
    assert results["wrong"] == ["all"]
    assert results["compared"]["all"] == {
        "trouble": "RuntimeError: CUDA error: an illegal memory access was encountered"
    }
    assert results["compared"]["first"]["right"]
    assert results["compared"]["second"] == {"trouble": "not run"}


def test_time_is_that_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has an adapter, first one for both rows, then two, in graphs of steps with adapters."""
    tape = Tape()
    with_graphs(monkeypatch, tape)
    monkeypatch.setattr(adapters, "_TURNS", 1)
    monkeypatch.setattr(executor, "SETTLING", 2)
    *_, last = adapters.time_adapters(SCALE)
    assert "trouble" not in last["timed"]
    assert last["timed"]["batch 2"].keys() == {"nobody", "one for all", "eight"}
    assert tape.replayed == ([1] * 6 + [2] * 6) * 3


def test_what_the_stage_raises_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: Any) -> Any:
        raise ValueError("no place")

    monkeypatch.setattr(adapters, "_install", breaks)
    monkeypatch.setattr(adapters, "_written", breaks)
    results: Results = {}
    for part in (*adapters.compare(SCALE), *adapters.time_adapters(SCALE)):
        results |= part
    record = {"results": results, "complete": True}
    said = table({"adapters": record, "adapter_times": record})
    assert "| wrong: all; 4 not run | **no** |" in said
    assert "| ValueError: no place | **no** |" in said
