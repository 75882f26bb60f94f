"""The worker over a model of random weights: sizes, order and errors. Text is compared in test_generation."""

import json
import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tercet.kernels.native.library import available_cores, load_library, missing_library
from tercet.protocol.messages.values import SamplingParams, pack_ints, unpack_floats
from tercet.scheduler.core.plan import PageUpdate, Plan, Row, SlotInit
from tercet.scheduler.device import cpu_threads
from tercet.scheduler.device.device_memory import available_bytes
from tercet.scheduler.executor import kv_budget, kv_pool, loading, tp_worker
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.executor.worker_options import WorkerOptions

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": [2, 7],
    "torch_dtype": "float32",
}
PAGE_BYTES = 2 * 3 * 8 * 2 * 8 * 4
"""Keys and values, layers, tokens, heads, head_dim, bytes."""
WHY_NOT_NATIVE = re.escape(missing_library() or "they come with attention backend 'cpu'")
"""Of a worker on plain torch."""


@pytest.fixture
def options(tmp_path: Path) -> WorkerOptions:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return WorkerOptions(model=tmp_path, load_format="dummy", device="cpu", slots=4, page_size=8)


def prefill(slot: int = 0, tokens: int = 5, top_logprobs: int = -1) -> Plan:
    init = SlotInit(
        slot=slot,
        tokens=pack_ints(range(1, tokens + 1)),
        prompt_tokens=tokens,
        choice=0,
        sampling=SamplingParams(max_new_tokens=9, temperature=1.0, seed=5),
        top_logprobs=top_logprobs,
    )
    return Plan(
        step=0, introduce=[init], pages=[PageUpdate(slot, 0, [[1, 3]])], rows=[Row(slot, 0, tokens, sample=True)]
    )


def decodes(count: int) -> list[Plan]:
    return [Plan(step=1 + step, rows=[Row(0, 5 + step, 1, sample=True)]) for step in range(count)]


def test_capacity_tells_what_the_config_and_the_options_say(options: WorkerOptions) -> None:
    worker = TpModelWorker(replace(options, kv_cache_bytes=5 * PAGE_BYTES + 17, context_length=100))
    capacity = worker.capacity
    assert [(group.name, group.pages) for group in capacity.groups] == [("full", 5)]
    assert (capacity.page_size, capacity.slots, capacity.context_length) == (8, 4, 100)
    assert (capacity.vocab_size, capacity.eos_token_ids) == (96, [2, 7])
    worker.close()


def test_the_cache_is_never_larger_than_all_slots_can_fill(
    options: WorkerOptions, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        worker = TpModelWorker(options)
    assert worker.capacity.groups[0].pages == 4 * 128 // 8
    assert "KV cache: 512 tokens, 0.00 GiB" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_cache_bytes": PAGE_BYTES - 1}, "do not hold one page"),
        ({"context_length": 129}, "beyond the model's 128"),
        ({"attention_backend": "none"}, "no attention backend 'none'"),
        ({"attention_backend": "torch_native", "quantization": "int8"}, f"int8 needs native kernels: {WHY_NOT_NATIVE}"),
        ({"dtype": "float16", "quantization": "int8"}, "int8 needs native kernels"),
    ],
)
def test_what_cannot_be_built_is_refused(options: WorkerOptions, changes: dict[str, object], message: str) -> None:
    with pytest.raises(Exception, match=message):
        TpModelWorker(replace(options, **changes))  # type: ignore[arg-type]


def test_a_cache_that_there_is_no_memory_for_is_refused(
    options: WorkerOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux promises any: it would be the first requests that find out, when their pages are touched."""
    monkeypatch.setattr(kv_budget, "total_bytes", lambda _: 5 * PAGE_BYTES)
    TpModelWorker(replace(options, kv_cache_bytes=6 * PAGE_BYTES - 1)).close()
    with pytest.raises(ValueError, match=rf"a KV cache of {6 * PAGE_BYTES} bytes is more than all memory"):
        TpModelWorker(replace(options, kv_cache_bytes=6 * PAGE_BYTES))
    more_than_slots_fill = replace(options, slots=1, context_length=40, kv_cache_bytes=900 << 30)
    TpModelWorker(more_than_slots_fill).close()


def test_a_cache_that_there_is_no_memory_for_is_refused_in_a_line(
    options: WorkerOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def zeros(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 900 GiB.")

    monkeypatch.setattr(kv_pool, "zeros", zeros)
    with pytest.raises(ValueError, match=r"^no memory for a KV cache of 40 tokens, lower kv_cache_bytes: CUDA out of"):
        TpModelWorker(replace(options, kv_cache_bytes=5 * PAGE_BYTES))


@pytest.mark.parametrize(
    ("module", "needs", "what"),
    [(tp_worker, "attention_backend", "a first kernel"), (loading, "build_model", "the model's weights")],
)
def test_a_start_without_memory_is_refused_in_a_line(
    module: ModuleType, needs: str, what: str, options: WorkerOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lack(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    monkeypatch.setattr(module, needs, lack)
    with pytest.raises(ValueError, match=f"^no memory for {what}: CUDA out of memory"):
        TpModelWorker(options)


@pytest.mark.parametrize(
    "changes",
    [
        {"slots": 0},
        {"threads": 0},
        {"page_size": 0},
        {"mem_fraction_static": 0.0},
        {"max_total_tokens": 7},
        {"context_length": 0},
        {"kv_cache_dtype": "fp8"},
    ],
)
def test_options_refuse_nonsense(options: WorkerOptions, changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        replace(options, **changes)  # type: ignore[arg-type]


def test_steps_submitted_ahead_of_their_results_run_in_order(options: WorkerOptions) -> None:
    plain, ahead = TpModelWorker(options), TpModelWorker(replace(options, overlap=True))
    expected = [plain.submit(plan).result().token_ids for plan in (prefill(), *decodes(6))]
    pending = [ahead.submit(plan) for plan in (prefill(), *decodes(6))]
    assert [step.result().token_ids for step in pending] == expected
    assert [step.result().step for step in pending] == list(range(7))
    ahead.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_what_a_step_raises_its_result_raises(options: WorkerOptions, overlap: bool) -> None:
    worker = TpModelWorker(replace(options, overlap=overlap))
    pending = worker.submit(Plan(step=0, rows=[Row(2, 0, 1, sample=True)]))
    with pytest.raises(ValueError, match="slot 2 was never introduced"):
        pending.result()
    worker.close()


def test_memory_is_what_the_machine_says() -> None:
    total = int(Path("/proc/meminfo").read_text(encoding="ascii").split()[1]) * 1024
    assert 0 < available_bytes(torch.device("cpu")) <= total


@pytest.mark.skipif(bool(missing_library()), reason=missing_library())
def test_on_a_cpu_native_kernels_run_the_model_on_the_threads_given(options: WorkerOptions) -> None:
    library = load_library()
    before = library.threads
    try:
        for count in (1, 3):
            worker = TpModelWorker(replace(options, threads=count))
            assert library.threads == count
            plain = TpModelWorker(replace(options, attention_backend="torch_native"))
            plans = [prefill(), *decodes(6)]
            assert [worker.submit(plan).result() for plan in plans] == [plain.submit(plan).result() for plan in plans]
    finally:
        library.set_threads(before)


def test_plain_torch_runs_on_the_threads_given(options: WorkerOptions) -> None:
    before = torch.get_num_threads()
    try:
        for count in (3, 2):
            TpModelWorker(replace(options, attention_backend="torch_native", threads=count))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(before)


def test_plain_torch_keeps_to_a_containers_quota(
    options: WorkerOptions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cpu.max").write_text("200000 100000\n", encoding="ascii")
    monkeypatch.setattr(cpu_threads, "available_cores", lambda: available_cores(tmp_path))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    try:
        for had, has in ((5, 2), (1, 1)):
            torch.set_num_threads(had)
            TpModelWorker(replace(options, attention_backend="torch_native"))
            assert torch.get_num_threads() == has
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(bool(missing_library()), reason=missing_library())
def test_linear_layers_of_what_runs_on_torch_run_on_the_threads_given(options: WorkerOptions) -> None:
    library = load_library()
    before = torch.get_num_threads(), library.threads
    try:
        TpModelWorker(replace(options, kv_cache_dtype="fp8_e4m3", threads=3))
        assert (torch.get_num_threads(), library.threads) == (1, 3), "little is left to torch"
    finally:
        torch.set_num_threads(before[0])
        library.set_threads(before[1])


@pytest.mark.skipif(bool(missing_library()), reason=missing_library())
@pytest.mark.parametrize("experts", [False, True])
def test_int8_takes_other_weights(options: WorkerOptions, experts: bool) -> None:
    if experts:
        config = {**CONFIG, "architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
        (options.model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    logits = []
    for quantization in ("none", "int8"):
        worker = TpModelWorker(replace(options, quantization=quantization))
        logits.append(worker.submit(prefill(top_logprobs=5)).result().logprobs[0].chosen)
    assert logits[0] != logits[1]


@pytest.mark.skipif(bool(missing_library()), reason=missing_library())
@pytest.mark.parametrize(
    ("architecture", "why"), [("MixtralForCausalLM", ""), ("OlmoeForCausalLM", "native kernels norm no heads together")]
)
def test_experts_run_on_native_kernels_or_on_torch_which_is_said_once(
    options: WorkerOptions, caplog: pytest.LogCaptureFixture, architecture: str, why: str
) -> None:
    config = {**CONFIG, "architectures": [architecture], "num_local_experts": 4, "num_experts_per_tok": 2}
    (options.model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    results = []
    for backend in ("cpu", "torch_native"):
        worker = TpModelWorker(replace(options, attention_backend=backend))
        results.append([worker.submit(plan).result().token_ids for plan in (prefill(), *decodes(6))])
    assert results[0] == results[1]
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert said == ([f"{why}: {architecture} runs on torch except for supported layers"] if why else [])


def test_a_cache_of_8_bits_has_room_for_twice_the_tokens_of_16(
    options: WorkerOptions, caplog: pytest.LogCaptureFixture
) -> None:
    pages = {}
    for dtype in ("auto", "bfloat16", "fp8_e4m3"):
        worker = TpModelWorker(replace(options, kv_cache_dtype=dtype, kv_cache_bytes=5 * PAGE_BYTES))
        pages[dtype] = worker.capacity.groups[0].pages
        assert len({worker.submit(plan).result().token_ids[0] for plan in (prefill(), *decodes(6))}) > 2
    assert pages == {"auto": 5, "bfloat16": 10, "fp8_e4m3": 20}
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    why = "native kernels do not read keys and values in float8_e4m3fn"
    native = f"{why}: LlamaForCausalLM runs on torch except for supported layers"
    assert said == ([] if missing_library() else [native])


def test_caches_are_near_the_one_of_the_models_dtype(options: WorkerOptions) -> None:
    """The log-probabilities of a token after five in the cache; what bfloat16 rounds is less than what 8 bits do."""
    chosen = {}
    for dtype in ("auto", "bfloat16", "fp8_e4m3"):
        worker = TpModelWorker(replace(options, kv_cache_dtype=dtype))
        result = worker.submit(prefill(top_logprobs=5)).result()
        chosen[dtype] = unpack_floats(result.logprobs[0].top_logprobs)
    errors = [max(abs(a - b) for a, b in zip(chosen["auto"], chosen[name], strict=True)) for name in list(chosen)[1:]]
    assert 0 < errors[0] < errors[1] < 0.01


def test_a_checkpoints_scales_are_those_of_the_cache(
    options: WorkerOptions, checkpoints: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = shutil.copytree(checkpoints("qwen3"), tmp_path / "model")
    asked = replace(options, model=directory, load_format="safetensors", kv_cache_dtype="fp8_e4m3")
    plain = TpModelWorker(asked).submit(prefill(top_logprobs=5)).result()
    assert "no scales for keys and values in 8 bits, using 1" in caplog.text
    tensors = load_file(directory / "model.safetensors")
    scales = {
        f"model.layers.{layer}.self_attn.{name}": torch.tensor(0.37)
        for layer in range(3)
        for name in ("k_scale", "v_scale")
    }
    save_file(tensors | scales, directory / "model.safetensors")
    caplog.clear()
    scaled = TpModelWorker(asked).submit(prefill(top_logprobs=5)).result()
    assert "no scales" not in caplog.text
    a, b = (unpack_floats(result.logprobs[0].chosen)[0] for result in (plain, scaled))
    assert a != b
    assert a == pytest.approx(b, abs=0.3)  # rounded elsewhere, but the same keys and values


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grammar_backend": "nobody"}, "no grammar backend 'nobody'"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "kv_scale is 0.0, which is no scale"),
    ],
)
def test_what_can_be_refused_before_weights_are_loaded_is(
    changes: dict[str, Any], message: str, checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = shutil.copytree(checkpoints("llama"), tmp_path / "model")
    stored = load_file(directory / "model.safetensors")
    save_file({**stored, "model.layers.0.self_attn.kv_scale": torch.zeros(1)}, directory / "model.safetensors")
    loaded: list[int] = []
    given = WorkerOptions(model=directory, device="cpu", slots=1, **changes)
    with pytest.raises(ValueError, match=message):
        TpModelWorker(given, lambda done, _: loaded.append(done))
    assert not loaded


def test_the_tokenizers_own_end_token_ends_a_text(options: WorkerOptions) -> None:
    tokenizer = Tokenizer(WordLevel({f"w{number}": number for number in range(90)}, unk_token="w0"))
    (options.model / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    settings = {"added_tokens_decoder": {"90": {"content": "<end>", "special": True}}, "eos_token": "<end>"}
    (options.model / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    assert TpModelWorker(options).capacity.eos_token_ids == [2, 7, 90]
