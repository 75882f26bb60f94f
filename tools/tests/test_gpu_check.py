"""A dry run of every stage on the CPU, in Triton's interpreter, on shapes that mean nothing: is everything wired?"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the GPU path needs it")

from tercet.kernels.attention.torch_native import TorchNativeAttention
from tercet.kernels.triton import missing_triton
from tercet.kernels.triton.checks import CHECKS
from tools import gpu_check, gpu_stages
from tools.gpu_stages import SERVED_STAGES, STAGES, Scale, Shape

CPU = torch.device("cpu")
SHAPE = Shape("LlamaForCausalLM", 64, 96, 1, 2, 1, 32, 128)
TINY = Scale(
    device=CPU,
    dtype=torch.float32,
    large=SHAPE,
    others={"small": Shape("Qwen3ForCausalLM", 64, 96, 1, 2, 1, 32, 128, tied=True)},
    batches=(1, 2),
    context=16,
    prompt=32,
    decodes=4,
    requests=3,
    longest_input=6,
    longest_output=4,
    small_requests=11,
    small_lengths=(1, 4),
    prefix=8,
    operation_tokens=16,
    operation_width=64,
    operation_rows=2,
)

pytestmark = pytest.mark.skipif(bool(missing_triton(CPU)), reason=missing_triton(CPU))


class Engine:
    """Answers every request with as many tokens as it may have."""

    def generate(self, *, input_ids: list[list[int]], sampling_params: list[dict[str, Any]]) -> list[dict[str, Any]]:
        assert all(ids and max(ids) < SHAPE.vocab for ids in input_ids)
        return [{"output_ids": [1] * params["max_new_tokens"]} for params in sampling_params]


@contextmanager
def make_engine(model: str, **options: Any) -> Iterator[Engine]:
    config = json.loads((Path(model) / "config.json").read_text())
    assert options["load_format"] == "dummy"
    assert config["vocab_size"] == SHAPE.vocab
    yield Engine()


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(run: Any, device: torch.device, budget: float = 0.0) -> float:
        run()
        return 0.5

    for where in ("tercet.kernels.bench", "tercet.kernels.triton.figures"):
        monkeypatch.setattr(f"{where}.measure", once)
    for where in ("tercet.kernels.bench", "tercet.kernels.triton.figures"):
        monkeypatch.setattr(f"{where}.HEADS", 2)
        monkeypatch.setattr(f"{where}.KV_HEADS", 1)
    monkeypatch.setattr("tercet.kernels.bench.VOCAB", 64)
    monkeypatch.setattr(gpu_stages, "CHECKS", {"triton embedding": CHECKS["triton embedding"]})


@pytest.mark.parametrize("stage", [*STAGES, *SERVED_STAGES])
def test_a_stage_gives_a_record(stage: str, tmp_path: Path) -> None:
    with np.errstate(all="ignore"):
        record = gpu_check.run_stage(stage, TINY, make_engine)
    path = gpu_check.write(record, tmp_path)
    assert json.loads(path.read_text()) == json.loads(json.dumps(record))
    assert record["ceilings"].keys() == {"copy_gb_per_s", "bf16_tflop_per_s"}
    assert {"date", "machine", "command", "seconds"} < record.keys()
    results = record["results"]
    match stage:
        case "correctness":
            assert results["wrong"] == []
            assert results["checks"]["triton embedding"] == "ok"
        case "decode":
            assert results.keys() == {"batch 1", "batch 2"}
            assert all(row["share_of_limit"] > 0 for row in results.values())
        case "model":
            assert results == {"tokens": 4, "alike": 4}
        case "offline":
            assert results["output_tokens"] >= 3
        case "shared_prefix":
            assert results["cached"]["output_tokens"] == results["plain"]["output_tokens"] == 11 * 32


def test_a_wrong_operation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchNativeAttention, "attend", lambda _, q, *__, **___: q)
    assert gpu_stages.correctness(TINY)["wrong"] == ["attention torch_native"]


def test_the_bytes_of_a_model_are_those_of_its_shape() -> None:
    assert gpu_stages.LLAMA_8B.weights * 2 == pytest.approx(15.0e9, rel=0.01)
    assert gpu_stages.QWEN_06B.weights == pytest.approx(0.596e9, rel=0.01)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_refuses(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu_check.main(["--stage", "machine", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "no GPU is here: nothing was measured\n"
    assert list(tmp_path.iterdir()) == []
