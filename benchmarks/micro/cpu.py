"""Native CPU kernels against torch: linear layers of two models, attention, and whole decode steps.

Each pair is measured alternately, so that other load affects both alike. The ceiling is the highest rate at which one
thread per core read memory in the same run. Shapes are those of SmolLM-135M and Qwen2.5-0.5B, in bfloat16.
"""

import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812

from tercet.kernels.attention.api import AttentionBackend, AttentionParams
from tercet.kernels.attention.cpu import CpuAttention
from tercet.kernels.attention.torch_native import TorchNativeAttention
from tercet.kernels.native.library import available_cores, load_library
from tercet.kernels.native.linear import PackedLinear, pack_linear
from tercet.kernels.tools.check import make_batch
from tercet.protocol.messages.values import SamplingParams, pack_ints
from tercet.scheduler.core.plan import PageUpdate, Plan, Row, SlotInit
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.executor.worker_options import WorkerOptions

Measured = tuple[str, float, str, float | None]
"""(figure, measured, unit, target or None)"""

Calls = dict[str, Callable[[], object]]

SHARED = {"max_position_embeddings": 2048, "tie_word_embeddings": True, "torch_dtype": "bfloat16"}
MODELS = {
    "tiny-135m": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-5,
        **SHARED,
    },
    "qwen-0.5b": {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        **SHARED,
    },
}
LINEARS = {
    "tiny-135m": [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)],
    "qwen-0.5b": [(1152, 896), (896, 896), (9728, 896), (896, 4864), (151936, 896)],
}
BATCHES = (1, 8, 32)
ROTATED = 60_000_000
"""Bytes of weights used in rotation, so that they come from memory as in a model."""


def best_of(runs: Calls, budget: float = 0.4) -> dict[str, float]:
    """Return the seconds of the fastest call of each, called alternately for about `budget` seconds each."""
    best = dict.fromkeys(runs, float("inf"))
    for run in runs.values():
        run()
    end = time.perf_counter() + budget * len(runs)
    for _ in range(50):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
        if time.perf_counter() > end:
            break
    return best


def ceiling() -> float:
    """Return GB/s of one reading thread per core."""
    blocks = [torch.ones(1 << 25) for _ in range(available_cores())]

    def read() -> None:
        threads = [threading.Thread(target=block.sum) for block in blocks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return sum(block.nbytes for block in blocks) / best_of({"read": read})["read"] / 1e9


def linears(most: float) -> Iterator[Measured]:
    """Yield the rate at which native layers read weights, and their speed-up over torch's two variants."""
    library = load_library()
    for model, shapes in LINEARS.items():
        for outputs, inputs in shapes:
            size = 2 * outputs * inputs
            weights = [torch.randn(outputs, inputs).bfloat16() for _ in range(max(1, ROTATED // size))]
            packed = [pack_linear(library, weight) for weight in weights]
            for batch in BATCHES:
                name = f"{model} {outputs} x {inputs}, batch {batch}"
                seconds = best_of(linear_calls(batch, weights, packed))
                rate = size * len(weights) / seconds["ours"] / 1e9
                yield f"{name}: ours", rate, "GB/s", 0.7 * most if batch == 1 else None
                yield f"{name}: ours / F.linear", seconds["torch"] / seconds["ours"], "x", 1.3
                yield f"{name}: ours / oneDNN prepacked", seconds["onednn"] / seconds["ours"], "x", 1.3


def linear_calls(batch: int, weights: list[torch.Tensor], packed: list[PackedLinear]) -> Calls:
    """Return the same products in three variants."""
    x = torch.randn(batch, weights[0].shape[1])
    half = x.bfloat16()
    prepacked = [torch.ops.mkldnn._reorder_linear_weight(weight, batch) for weight in weights]
    pointwise = torch.ops.mkldnn._linear_pointwise
    return {
        "ours": lambda: [linear(x) for linear in packed],
        "torch": lambda: [F.linear(half, weight) for weight in weights],
        "onednn": lambda: [pointwise(half, weight, None, "none", [], "") for weight in prepacked],
    }


def attention() -> Iterator[Measured]:
    """Yield the speed-up over plain torch."""
    for heads, kv_heads in ((9, 3), (14, 2)):
        for rows in ([(1, 1024)], [(1, 160)] * 32, [(1, 1024)] * 8, [(256, 1024)]):
            seconds = best_of(attention_calls(rows, heads, kv_heads))
            name = f"attention {heads}/{kv_heads} heads, {len(rows)} x {rows[0][0]} of {rows[0][1]}"
            yield f"{name}: ours", seconds["ours"] * 1e6, "us", None
            yield f"{name}: ours / torch_native", seconds["torch"] / seconds["ours"], "x", 1.3


def attention_calls(rows: list[tuple[int, int]], heads: int, kv_heads: int) -> Calls:
    """Return the same attention in two variants."""
    batch = make_batch(rows, 16, torch.device("cpu"))
    k, v = torch.randn(2, int(batch.page_table.max()) + 1, 16, kv_heads, 64).bfloat16().unbind()
    q = torch.randn(sum(batch.host_query_lens), heads, 64).bfloat16()
    backends: dict[str, AttentionBackend] = {"ours": CpuAttention(), "torch": TorchNativeAttention()}
    for backend in backends.values():
        backend.plan(batch)
    return {name: partial(backend.attend, q, k, v, AttentionParams(scale=0.125)) for name, backend in backends.items()}


class Decoding:
    """Worker with random weights that decodes several requests after prompts of 128 tokens."""

    def __init__(self, model: str, batch: int, folder: Path, **options: str) -> None:
        (folder / "config.json").write_text(json.dumps(MODELS[model]), encoding="utf-8")
        config = WorkerOptions(
            model=folder,
            load_format="dummy",
            device="cpu",
            slots=batch,
            context_length=1024,
            **options,  # type: ignore[arg-type]
        )
        self.worker = TpModelWorker(config)
        self.batch, self.length = batch, 128
        self.threads = available_cores() if options.get("attention_backend") == "torch_native" else 1
        for slot in range(batch):
            init = SlotInit(
                slot=slot,
                tokens=pack_ints((7 * slot + place) % 1000 for place in range(128)),
                prompt_tokens=128,
                choice=0,
                sampling=SamplingParams(max_new_tokens=800, temperature=0.0),
            )
            pages = PageUpdate(slot, 0, [list(range(slot * 64, slot * 64 + 64))])
            rows = [Row(slot, 0, 128, sample=True)]
            self.worker.submit(Plan(step=slot, introduce=[init], pages=[pages], rows=rows)).result()

    def step(self) -> None:
        """Decode a token for each request; plain torch uses all cores, as it would alone."""
        torch.set_num_threads(self.threads)
        rows = [Row(slot, self.length, 1, sample=True) for slot in range(self.batch)]
        self.worker.submit(Plan(step=self.length, rows=rows)).result()
        self.length += 1


def steps(most: float) -> Iterator[Measured]:
    """Yield tokens per second of whole decode steps, with native kernels and with plain torch."""
    with tempfile.TemporaryDirectory() as name:
        for model, shape in MODELS.items():
            for batch in BATCHES:
                kinds = {kind: {"quantization": kind} for kind in ("none", "int8", "int4")}
                kinds["torch"] = {"attention_backend": "torch_native"}
                decoding = {kind: Decoding(model, batch, Path(name), **options) for kind, options in kinds.items()}
                seconds = best_of({kind: served.step for kind, served in decoding.items()})
                before = seconds["torch"]
                weights = sum(2 * n * k for n, k in LINEARS[model][:-1]) * int(str(shape["num_hidden_layers"]))
                weights += 2 * LINEARS[model][-1][0] * LINEARS[model][-1][1]
                limit = 0.7 * most * 1e9 / weights if batch == 1 else None
                yield f"{model} batch {batch}: plain torch", batch / before, "tokens/s", None
                yield f"{model} batch {batch}: native bfloat16", batch / seconds["none"], "tokens/s", limit
                yield f"{model} batch {batch}: native int8", batch / seconds["int8"], "tokens/s", None
                yield f"{model} batch {batch}: int8 / bfloat16", seconds["none"] / seconds["int8"], "x", None
                yield f"{model} batch {batch}: int4 / int8", seconds["int8"] / seconds["int4"], "x", None
                yield f"{model} batch {batch}: native / plain torch", before / seconds["none"], "x", 1.3


def rows() -> Iterator[Measured]:
    """Yield all figures, on the cores that this process may use."""
    with torch.inference_mode():
        torch.set_num_threads(1)
        most = ceiling()
        yield f"memory read by {available_cores()} threads", most, "GB/s", None
        torch.set_num_threads(available_cores())
        yield from linears(most)
        yield from attention()
        yield from steps(most)
