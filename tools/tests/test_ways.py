"""Ways of 8-bit products: their times, and the table that serving reads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="these are Triton's kernels")

from tercet.kernels.triton import missing_triton
from tercet.kernels.triton.linear.quantized import multiply
from tools import gpu_check
from tools.gpu_stages import ways
from tools.gpu_stages.records import by_device
from tools.gpu_stages.ways import choices_of, time_ways
from tools.tests.tiny import CPU, TINY

RESULTS: dict[str, Any] = {
    "ways": {
        "architecture": "sm90",
        "fp8": {
            "64 x 32": {
                "2": {"weights": 5.0, "sums": 7.0, "rows": 9.0},
                "32": {"weights": 9.0, "sums": 7.0, "rows": 8.0},
                "16": {"weights": 6.0, "sums": 7.0, "rows": 8.0},
                "512": {"weights": 90.0, "sums": "refused: no", "rows": 20.0},
            }
        },
        "int8": {"64 x 32": {"2": {"weights": "wrong: 0.5 of the result", "integers": "refused: no"}}},
    }
}


def test_the_table_has_the_rows_from_which_a_way_is_the_fastest() -> None:
    found = choices_of(RESULTS)["sm90"]
    assert found["fp8"] == {"64 x 32": [[1, "weights"], [32, "sums"], [512, "rows"]]}
    assert found["int8"] == {"64 x 32": [[1, "weights"]]}


def test_the_table_of_an_architecture_is_replaced_and_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "choices.json"
    path.write_text(json.dumps({"sm90": {"int8": {}}, "sm100": {"fp8": {"*": [[1, "rows"]]}}}))
    record = {"stage": "tuning", "date": "2026-11-27", "machine": {"gpu 0": "NVIDIA H100"}, "results": RESULTS}
    assert gpu_check.write_choices(by_device([record]), path) == 0
    assert json.loads(path.read_text()) == {"sm100": {"fp8": {"*": [[1, "rows"]]}}, **choices_of(RESULTS)}
    assert gpu_check.write_choices({}, path) == 2


@pytest.mark.skipif(bool(missing_triton(CPU)), reason=missing_triton(CPU))
def test_each_way_is_checked_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has no products of blocks, and a product that is wrong has no time."""

    def doubled(*given: Any) -> torch.Tensor:
        out = multiply(*given)
        return out * 2 if given[3] == "integers" else out

    def once(run: Any, *_: Any) -> float:
        run()
        return 1.0

    monkeypatch.setattr(ways, "multiply", doubled)
    monkeypatch.setattr(ways, "measure_recorded", once)
    results: dict[str, Any] = {}
    for part in time_ways(TINY, "ways"):
        results |= part
    assert results["architecture"] == "cpu"
    assert not any(results["fp8 block"].values()), "these shapes have no whole blocks"
    for by_rows in results["int8"].values():
        assert by_rows["32"]["weights"] == 5e5
        assert by_rows["32"]["integers"] == "wrong: 1 of the result"
    assert not any(results["int4"].values()) or all("2" in by_rows for by_rows in results["int4"].values())
    for by_rows in results["fp8"].values():
        assert by_rows["32"]["weights"] == 5e5
