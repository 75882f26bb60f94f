"""Dry run of every stage on the CPU, in Triton's interpreter, on tiny shapes."""

import json
import os
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tercet.scheduler.executor import loading
from tercet.scheduler.models.weights import quantized_checkpoints

pytest.importorskip("triton", reason="the GPU path needs it")

from tercet.kernels.attention.torch_native import TorchNativeAttention
from tercet.kernels.attention.triton import TritonAttention
from tercet.kernels.ops.quantized import QuantizedWeight, dequantize
from tercet.kernels.tools.bench import ceilings
from tercet.kernels.triton import missing_triton
from tercet.scheduler.executor.kv_pool import KVPool
from tercet.scheduler.models.layers.layer_ops import TritonLayerOps
from tools import gpu_check
from tools.gpu_check import SERVED_STAGES, STAGES
from tools.gpu_stages import executor, kernels, quantised, serving, tuning, worker
from tools.gpu_stages.records import read
from tools.gpu_stages.scale import LLAMA_8B, PUBLIC_MIXTURES, QWEN_06B, Results, model_directory
from tools.gpu_stages.table import ROWS, ratio_of, table
from tools.gpu_stages.traces import idle_share
from tools.gpu_stages.worker import Offline
from tools.tests.tiny import CPU, SHAPE, TINY, make_engine

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.skipif(bool(missing_triton(CPU)), reason=missing_triton(CPU)),
    pytest.mark.usefixtures("short_stages"),
]


QUICK_STAGES = ("decode", "mixtures", "speculation", "prefill", "launches", "step", *SERVED_STAGES)


def run(stages: Sequence[str], out: Path) -> Path:
    with np.errstate(all="ignore"):
        for stage in stages:
            gpu_check.run_stage(stage, TINY, make_engine, out)
    return out


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, short_stages: None) -> Path:
    """Return the folder with the records of every stage."""
    return run((*STAGES, *SERVED_STAGES), tmp_path_factory.mktemp("results"))


def assert_adapter_times(results: dict[str, Any]) -> None:
    timed = results["timed"]
    assert {"batch 1", "batch 2"} < timed.keys()
    for turns in (timed["batch 1"], timed["batch 2"], {"all": {"speeds": timed["prefill_tokens_per_s"]}}):
        for figures in turns.values():
            assert all(figures.values())


def assert_tuning(results: dict[str, Any]) -> None:
    assert results["wrong"] == []
    for name, (tilings, _) in tuning.OPERATIONS.items():
        count = 1 if name.startswith("row") else 2
        kinds = {f"{kind}, {count} rows" for kind in ("fp8", "int8", "int4")}
        sizes = {"prompt 16"} if "prompt" in name else {"batch 1", "batch 2"}
        assert results[name].keys() >= (kinds if "few bits" in name else sizes)
        assert len(results[name]) == {"latent prompt": 1, "prompt": 2}.get(name, 2 if "decode" in name else 3)
        for rows in results[name].values():
            assert {row["tiling"] for row in rows} == set(map(str, tilings))
            assert [row["tiling"] for row in rows if row["in_use"]] == [str(tilings[0])]
            assert all(row["us"] > 0 and row["share"] > 0 for row in rows)


def assert_mixtures(results: dict[str, Any]) -> None:
    assert results["timed"].keys() == TINY.mixtures.keys()
    for row in results["timed"].values():
        assert row["layers"] == 2
        assert row["prefill_tokens_per_s"] > 0
        assert all(row[f"batch {batch}"]["share_of_limit"] > 0 for batch in (1, 2))


def assert_torch_kernels(results: dict[str, Any]) -> None:
    """A CPU refuses cuDNN and grouped products in fp8, and runs the others."""
    timed = results["timed"]
    assert not any("trouble" in row for row in timed.values())
    for name in ("attention, cuDNN", "experts, _scaled_grouped_mm"):
        assert all(said.startswith("refused: ") for said in timed[name].values())
    for name in ("attention, own", "product, full", "product, own int4", "product, _int_mm", "experts, own mxfp4"):
        assert all(microseconds > 0 for microseconds in timed[name].values())
    assert timed["product, full"].keys() == {"2 rows", "32 rows"}


def assert_served(stage: str, results: dict[str, Any]) -> None:
    """Check the results of stages that serve requests."""
    match stage:
        case "offline":
            assert results["output_tokens"] >= 3
        case "shared_prefix":
            assert results["cached"]["output_tokens"] == results["plain"]["output_tokens"] == 11 * 32
        case "small_models":
            assert results["qwen3-0.6b"].keys() > {"first_load_s", "seconds"}
        case "transformers":
            assert results["transformers"]["requests"] == 2
            assert results["ratio"] == results["tercet"]["output_tokens_per_s"] / 0.5


@pytest.mark.slow
@pytest.mark.parametrize("stage", [*STAGES, *SERVED_STAGES])
def test_a_stage_gives_a_record(stage: str, out: Path) -> None:
    (path,) = out.glob(f"*-{stage}.json")
    record = json.loads(path.read_text())
    assert record["complete"]
    assert record["ceilings"].keys() == {"copy_gb_per_s", "bf16_tflop_per_s"}
    assert {"date", "machine", "command", "seconds"} < record.keys()
    results = record["results"]
    match stage:
        case "adapters":
            assert results["wrong"] == []
            assert results["compared"].keys() == {"unused", "none", "first", "second"}
        case "adapter_times":
            assert_adapter_times(results)
        case "mixtures":
            assert_mixtures(results)
        case "torch_kernels":
            assert_torch_kernels(results)
        case "weights":
            assert results["replaced"]["right"]
        case "correctness":
            assert results["wrong"] == []
            assert results["checks"]["triton embedding"] == results["checks"]["grid triton"] == "ok"
            assert results["checks"]["grid flashinfer"].startswith("not here")
        case "decode":
            wide = results.pop("wide tables")
            assert wide.pop("context_length") == 256
            for rows in (results, wide):
                assert rows.keys() == {"batch 1", "batch 2"}
                assert all(value > 0 for row in rows.values() for value in row.values())
        case "rotation":
            assert results.keys() == {"one kernel", "two kernels"}
            assert all(rows.keys() == {"batch 1", "batch 2"} for rows in results.values())
        case "step":
            assert results.keys() == {"batch 1", "batch 2"}
            assert all(value > 0 for row in results.values() for value in row.values())
        case "idle":
            assert results.keys() == {"batch 1", "batch 2", "qwen3-0.6b"}
            assert all(0 <= row["idle_share"] < 1 and row["pieces"] > 3 for row in results.values())
        case "launches":
            assert results.keys() == {"8 tokens", "16 tokens"}
            assert all(0 < row["launch_share"] <= 1 for row in results.values())
        case "model":
            assert results["torch_native"] == results["triton"] == {"tokens": 4, "alike": 4}
        case "quantised":
            assert results["wrong"] == []
            assert results["compared"].keys() == quantised._COMPARED.keys()
            assert all(0 < row["allowed"] < 0.1 for row in results["compared"].values())
        case "quantised_times":
            assert results["timed"].keys() == quantised._TIMED.keys()
            for row in results["timed"].values():
                assert row["layers"] == 1
                assert row.keys() > {"batch 1", "batch 2", "prefill_tokens_per_s"}
        case "speculation":
            assert results["wrong"] == []
            assert results["compared"]["float32"]["alike"] == 17
        case "speculation_times":
            for steps in (results["timed"]["batch 1"], results["timed"]["batch 2"]):
                assert all(value > 0 for step in steps.values() for value in step.values())
        case "tuning":
            assert_tuning(results)
        case _:
            assert_served(stage, results)


@pytest.mark.slow
def test_the_table_has_every_figure_of_the_stages(out: Path) -> None:
    check_table(out, {*STAGES, *SERVED_STAGES})


def test_the_table_has_the_figures_of_the_stages_that_ran(tmp_path: Path) -> None:
    check_table(run(QUICK_STAGES, tmp_path), {*QUICK_STAGES})


def check_table(out: Path, stages: Set[str]) -> None:
    """Only figures of other stages, and of sizes that the dry run does not have, are missing."""
    ((_, records),) = read(out).items()
    lines = table(records).splitlines()[2:]
    for row, line in zip(ROWS, lines, strict=True):
        larger = row.work.startswith("Llama-3.1-8B, batch") and "batch 1," not in row.work
        larger |= (
            "120b" in row.work
            or "Qwen3-14B" in row.work
            or row.work.endswith("of batch 256")
            or row.work.endswith("8B, batch 256")
        )
        assert ("not measured" in line) == (larger or row.stage not in stages), line


@pytest.mark.parametrize(
    "figure",
    [
        "Llama-3.1-8B, batch 1, 1k",
        "batch 32, 1k",
        "batch 256, 1k",
        "8k-token prompts",
        "offline, 500 requests",
        "Qwen3-0.6B, 256 requests",
        "Qwen3-14B, 256 requests",
        "Python adds to a step",
        "transformers' continuous batching",
        "90% shared 2k prefix",
        "ready after start",
        "GPU idle in a decode run",
        "Python outside the forward",
    ],
)
def test_a_figure_to_reach_has_a_stage_and_a_row(figure: str) -> None:
    (row,) = [row for row in ROWS if figure in row.work]
    assert row.stage in {**STAGES, **SERVED_STAGES}


def test_targets_are_reached_or_not() -> None:
    def record(results: Results, *, complete: bool = True) -> Results:
        return {"results": results, "complete": complete}

    row = {"ms_per_token": 3.9, "limit_ms": 3.5, "share_of_limit": 0.9}
    slow = {"ms_per_token": 9.0, "limit_ms": 4.5, "share_of_limit": 0.5}
    said = table({"decode": record({"batch 1": row, "batch 32": slow}, complete=False)})
    assert "| 3.90 ms, 90% of the limit of 3.50 ms (cut off) | yes |" in said
    assert "| 9.00 ms, 50% of the limit of 4.50 ms (cut off) | **no** |" in said
    assert said.count("not measured") == len(ROWS) - 2
    ratios = {"transformers": record({"ratio": 3.9}), "shared_prefix": record({"ratio": 2.6})}
    assert "| 3.9 times | **no** |" in table(ratios)
    assert "| 2.6 times | yes |" in table(ratios)


def test_what_is_explained_is_not_reached_by_that() -> None:
    def row_of(share: float) -> str:
        operation = {"share": share, "unit": "GB/s"}
        return table({"operations": {"results": {"fused bitmask": operation}, "complete": True}})

    why = "writes every other number, so half of each sector"
    assert f"| 0 of 1; below: fused bitmask 2% ({why}) | **no** |" in row_of(0.02)
    assert "| 1 of 1 | yes |" in row_of(0.85)


def test_what_ceilings_took_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server sizes its cache by the free memory, so the ceilings free theirs."""
    calls = list[str]()

    def measured(*given: Any) -> Any:
        calls.append("measured")
        return ceilings(*given)

    monkeypatch.setattr(kernels, "ceilings", measured)
    monkeypatch.setattr(kernels, "release_cached", lambda: calls.append("given back"))
    kernels.ceilings_of(TINY)
    assert calls == ["measured", "given back"]


def test_the_second_start_finds_the_kernels_of_the_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found: list[tuple[Path, list[str]]] = []

    @contextmanager
    def starting(model: str, **options: Any) -> Iterator[None]:
        cache = Path(os.environ["TRITON_CACHE_DIR"])
        found.append((cache, [path.name for path in cache.iterdir()]))
        (cache / "kernel").touch()
        yield

    results = list(serving.ready(TINY, starting))
    assert [[*part] for part in results] == [["uncompiled_s"], ["warm_s"]]
    [(first, before), (second, then)] = found
    assert first == second != tmp_path
    assert (before, then) == ([], ["kernel"])
    assert not first.exists()
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path)


def test_a_wrong_operation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchNativeAttention, "attend", lambda _, q, *__, **___: q)
    *_, last = kernels.correctness(TINY)
    assert last["wrong"] == ["attention torch_native"]


@pytest.mark.parametrize(
    "names",
    [["full", "fp8 channel", "awq", "mxfp4"], pytest.param([*quantised._COMPARED], marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_a_weight_that_is_put_in_full_wrongly_is_found(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale is 1% too large. In mxfp4 only experts are quantized, and they are not dequantized."""

    def slightly(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
        return dequantize(replace(weight, scales=weight.scales * 1.01), dtype)

    monkeypatch.setattr(quantized_checkpoints, "dequantize", slightly)
    forms = {name: quantised._COMPARED[name] for name in names}
    monkeypatch.setattr(quantised, "_COMPARED", forms)
    *_, last = quantised.compare(TINY)
    kinds = {name: form.kind for name, form in forms.items()}
    assert last["wrong"] == sorted(name for name, kind in kinds.items() if kind not in ("", "mxfp4"))


def test_a_cache_whose_scales_are_not_read_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault is in storing and dequantizing keys and values; the reference was computed before."""
    scored, calls = quantised._scored, list[Any]()

    def once(*given: Any, **options: Any) -> torch.Tensor:
        if len(calls) == 3:
            monkeypatch.setattr(KVPool, "scales_of", lambda *_: (1.0, 0.5))
        calls.append(given)
        return scored(*given, **options)

    monkeypatch.setattr(quantised, "_scored", once)
    monkeypatch.setattr(quantised, "_COMPARED", {"full, fp8 cache": quantised._COMPARED["full, fp8 cache"]})
    *_, last = quantised.compare(TINY)
    assert last["wrong"] == ["full, fp8 cache"]


def test_a_form_that_fails_keeps_no_other_from_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(name: str, part: str) -> Any:
        run = getattr(quantised, name)

        def instead(form: Any, *given: Any) -> Any:
            if form.kind == "awq":
                raise ValueError(f"no {part}")
            return run(form, *given)

        return instead

    for name, part in (("_compared", "comparison"), ("_timed", "time")):
        monkeypatch.setattr(quantised, name, breaks(name, part))
    for where in ("_COMPARED", "_TIMED"):
        forms = {name: form for name, form in getattr(quantised, where).items() if form.kind in ("", "awq")}
        monkeypatch.setattr(quantised, where, {name: forms[name] for name in reversed(forms)})
    results: Results = {}
    for found in (*quantised.compare(TINY), *quantised.time_forms(TINY)):
        results |= found
    assert results["wrong"] == ["awq"]
    assert results["compared"]["full"]["right"]
    assert results["timed"]["full"]["batch 2"]["ms_per_token"] > 0
    record = {"results": results, "complete": True}
    said = table({"quantised": record, "quantised_times": record})
    assert "| wrong: awq | **no** |" in said
    assert "| ValueError: no time | **no** |" in said


def test_rotation_is_timed_within_attention_and_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers are those of a GPU, which leave rotation to a backend that supports it."""
    calls, whole = list[int](), TritonAttention.attend_new

    def counted(*given: Any, **options: Any) -> torch.Tensor:
        calls.append(1)
        return whole(*given, **options)

    monkeypatch.setattr(TritonAttention, "attend_new", counted)
    monkeypatch.setattr(loading, "layer_ops", lambda _: TritonLayerOps())
    parts = [(list(part), len(calls)) for part in executor.rotation(replace(TINY, batches=(1,), decodes=2))]
    names, counts = zip(*parts, strict=True)
    assert names == (["one kernel"], ["two kernels"])
    assert counts[0] == counts[1] >= SHAPE.layers * (executor.SETTLING + 2)


def test_what_is_decoded_again_is_the_same() -> None:
    with model_directory(SHAPE, 64) as directory:
        offline = Offline(directory, TINY, slots=2, prompt=16, decodes=6)
        for slot in range(2):
            offline.prefill(slot, 16)
        first = offline.decode(2, 6)[1]
        offline.rewind(16)
        assert offline.decode(2, 6)[1] == first


def test_page_tables_are_as_wide_as_requests_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are as narrow as the decoded context unless the width of a server is requested."""
    contexts = list[int]()
    make = worker.make_worker

    def made(*given: Any, context: int, **options: Any) -> Any:
        contexts.append(context)
        return make(*given, context=context, **options)

    monkeypatch.setattr(worker, "make_worker", made)
    scale = replace(TINY, batches=(1,), decodes=2)
    assert [len([*stage(scale)]) for stage in (executor.decode, executor.rotation)] == [2, 2]
    narrow = -(-(scale.context + executor.SETTLING + scale.decodes + 8) // 16) * 16
    assert contexts == [narrow, scale.served_context, narrow, narrow]


def test_the_bytes_of_a_model_are_those_of_its_shape() -> None:
    assert LLAMA_8B.weights * 2 == pytest.approx(15.0e9, rel=0.01)
    assert LLAMA_8B.cached * 2 == 131_072
    assert QWEN_06B.weights == pytest.approx(0.596e9, rel=0.01)


def test_a_mixture_reads_the_experts_that_its_rows_choose() -> None:
    qwen, oss = (PUBLIC_MIXTURES[name] for name in ("qwen3-30b-a3b, 24 layers", "gpt-oss-20b"))
    assert qwen.touched(1) == pytest.approx(8)
    assert qwen.touched(10_000) == pytest.approx(128)
    read = qwen.weight_bytes(1, 2)
    assert read == pytest.approx((24 * (8 * 3 * 2048 * 768 + 2048 * 128 * 72) + 151_936 * 2048) * 2)
    experts = oss.weight_bytes(10_000, 2) - oss.other * 2
    assert experts == pytest.approx(24 * 32 * 3 * 2880 * 2880 * 17 / 32)


def test_a_kernel_that_torch_refuses_has_no_share() -> None:
    mine, other = {"1 rows": 5.0, "2 rows": "refused: no"}, {"1 rows": 10.0, "2 rows": 10.0}
    assert ratio_of(mine, other, "1 rows") == 0.5
    assert ratio_of(mine, other, "2 rows") is None
    timed = {"product, _int_mm": mine, "product, full": other}
    said = table({"torch_kernels": {"results": {"timed": timed}, "complete": True}})
    assert "| the same: `_int_mm` over bf16 | report | 1 rows: 0.50 | - |" in said


def test_idle_is_what_no_interval_covers() -> None:
    assert idle_share([(10, 20), (40, 50)]) == pytest.approx(0.5)
    assert idle_share([(15, 18), (10, 20), (20, 30), (25, 30)]) == 0
    assert idle_share([(30, 40), (0, 25), (5, 20)]) == pytest.approx(5 / 40)
    with pytest.raises(ValueError, match="nothing ran"):
        idle_share([])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_refuses(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu_check.main(["--stage", "machine", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "no GPU is here: nothing was measured\n"
    assert list(tmp_path.iterdir()) == []
    assert gpu_check.main(["--table", "--out", str(tmp_path)]) == 2
