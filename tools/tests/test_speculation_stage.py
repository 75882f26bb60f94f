"""Tests that the stage of draft tokens finds errors, with CUDA graphs and without, in Triton's interpreter."""

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the GPU path needs it")

from tercet.kernels.triton import missing_triton
from tercet.scheduler.executor.graphs.cuda_graphs import CudaGraphRunner
from tercet.scheduler.executor.slot_tables import SlotTables, StepInputs
from tools.gpu_stages import speculation
from tools.gpu_stages.scale import Results
from tools.gpu_stages.table import table
from tools.tests.test_adapters_stage import SCALE, Tape, with_graphs
from tools.tests.tiny import CPU

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing_triton(CPU)), reason=missing_triton(CPU))]

LONGER = replace(SCALE, compared_tokens=64)
TOKENS = 9


@pytest.fixture(autouse=True)
def _few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "_TOKENS", TOKENS)


def results_of(scale: Any = LONGER) -> Results:
    *_, last = speculation.compare(scale)
    return last


def test_right_tokens_are_said_again_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    tape = Tape()
    with_graphs(monkeypatch, tape, decode_rows=4, chained_rows=8)
    results = results_of()
    assert results["wrong"] == []
    found = results["compared"]["float32"]
    assert found["alike"] == found["tokens"] == TOKENS
    assert found["far"] <= found["allowed"] < found["moved"]
    assert tape.recorded[:6] == [4, 2, 1, 8, 4, 2]
    assert tape.replayed.count(8) == 4 * 2  # chains: three times what is right, and what is not
    assert tape.replayed.count(2) == 3 * (TOKENS - 1)


def test_two_dtypes_are_compared_where_a_model_has_another(monkeypatch: pytest.MonkeyPatch) -> None:
    results = results_of(replace(LONGER, dtype=torch.bfloat16))
    assert results["wrong"] == []
    assert [*results["compared"]] == ["float32", "bfloat16"]
    assert results["compared"]["bfloat16"].keys() == {"tokens", "alike", "right"}


def test_assumed_tokens_that_nobody_gets_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotTables, "assume", lambda *_: None)
    results = results_of()
    assert results["wrong"] == ["float32"]
    assert results["compared"]["float32"]["alike"] < TOKENS


@pytest.mark.parametrize("graphs", [False, True])
def test_rows_that_do_not_see_those_before_them_are_found(graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are equal, but each row except the last stores at the place of the next one."""
    if graphs:
        with_graphs(monkeypatch, Tape(), decode_rows=4, chained_rows=8)
    gather = SlotTables.gather

    def shifted(self: SlotTables, rows: Any) -> StepInputs:
        inputs = gather(self, rows)
        if inputs.chained:
            places = inputs.attention[0].slot_mapping
            places.copy_(places.roll(1))
        return inputs

    monkeypatch.setattr(SlotTables, "gather", shifted)
    results = results_of()
    assert results["wrong"] == ["float32"]
    found = results["compared"]["float32"]
    assert found["far"] > found["allowed"]


def test_chains_that_are_not_replayed_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """All graphs exist."""
    kind_of = CudaGraphRunner._graph_key
    with_graphs(monkeypatch, Tape(), decode_rows=4, chained_rows=8)

    def of_decodes(self: CudaGraphRunner, inputs: StepInputs, adapted: bool) -> Any:
        return None if inputs.chained else kind_of(self, inputs, adapted)

    monkeypatch.setattr(CudaGraphRunner, "_graph_key", of_decodes)
    said = results_of()["compared"]["float32"]["trouble"]
    assert said == "RuntimeError: of 32 decodes only 24 were replayed from graphs"
    with_graphs(monkeypatch, Tape(), decode_rows=2, chained_rows=SCALE.draft_rows)
    *_, timed = speculation.time_steps(SCALE)
    assert timed["timed"]["trouble"] == "RuntimeError: steps of 2 rows for each of 1 were not replayed from graphs"


def test_graphs_of_chains_that_cannot_be_recorded_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    tape = Tape(fails=8)
    with_graphs(monkeypatch, tape, decode_rows=4, chained_rows=8)
    results = results_of()
    assert results["wrong"] == ["float32"]
    assert "of 6 graphs only 5 could be recorded" in results["compared"]["float32"]["trouble"]


def test_time_is_that_of_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """One and two rows, for one choice and for the most; with the result awaited and with overlap."""
    tape = Tape()
    with_graphs(monkeypatch, tape, decode_rows=2, chained_rows=SCALE.draft_rows)
    *_, last = speculation.time_steps(SCALE)
    assert "trouble" not in last["timed"]
    assert {batch: [*rows] for batch, rows in last["timed"].items()} == {
        "batch 1": ["1 row", "2 rows", "4 rows"],
        "batch 2": ["1 row", "2 rows"],
    }
    each = 2 * (speculation._WARM + SCALE.decodes)
    assert tape.replayed == [rows for rows in (1, 2, 4, 2, 4) for _ in range(each)]


def test_the_table_tells_what_was_found_and_what_was_not() -> None:
    def row_of(**found: Results) -> str:
        wrong = [name for name, one in found.items() if one.get("right") is False]
        results = {"compared": found, "wrong": wrong, "timed": {"trouble": "not run"}}
        record = {"results": results, "complete": True}
        _, *lines = table({"speculation": record, "speculation_times": record}).splitlines()
        [first] = [line for line in lines if line.startswith("| tokens assumed in one step")]
        [second] = [line for line in lines if line.startswith("| a step of Llama-3.1-8B, 1k context, by")]
        assert second.endswith("| report | not run | - |")
        return first.split("the same | ")[1]

    full = {"tokens": 17, "alike": 17, "far": 2e-7, "moved": 3e-3, "right": True}
    short = {"tokens": 17, "alike": 5, "right": True}
    whole = "float32: 17 of 17 tokens (2.0e-07 apart, 3.0e-03 after a wrong one)"
    assert row_of(float32=full, bfloat16=short) == f"{whole}, bfloat16: 5 of 17 tokens | yes |"
    assert row_of(float32=full, bfloat16={"trouble": "not run"}) == f"{whole}, bfloat16: not run | - |"
    assert row_of(float32=full | {"right": False}, bfloat16=short).endswith("| **no** |")
