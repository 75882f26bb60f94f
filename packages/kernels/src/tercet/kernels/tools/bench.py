"""Benchmark of each operation beside this machine's measured ceilings: `tercet-kernels bench`."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from tercet.kernels.attention.api import AttentionParams
from tercet.kernels.attention.select import attention_backend
from tercet.kernels.native.library import load_library, missing_library
from tercet.kernels.native.ops import NativeOps
from tercet.kernels.ops import sampling
from tercet.kernels.ops.activation import silu_and_mul
from tercet.kernels.ops.philox import NoiseKey
from tercet.kernels.ops.rmsnorm import add_rmsnorm
from tercet.kernels.ops.rope import apply_rope, rope_cache
from tercet.kernels.ops.sampling import Filters
from tercet.kernels.ops.store_kv import store_kv
from tercet.kernels.tools.check import make_batch

PAGE_SIZE, HEADS, KV_HEADS, HEAD_DIM = 16, 32, 8, 128
VOCAB = 128_256


@dataclass(frozen=True)
class Figure:
    """Measurement; `amount` is bytes or floating-point operations of one call."""

    name: str
    seconds: float
    amount: float
    unit: Literal["GB/s", "GFLOP/s"]

    @property
    def achieved(self) -> float:
        """Throughput in `unit`."""
        return self.amount / self.seconds / 1e9


def measure(run: Callable[[], object], device: torch.device, budget: float = 0.5) -> float:
    """Return the seconds of the fastest of several calls, after a warm-up call."""
    best = float("inf")
    run()
    end = time.perf_counter() + budget
    for _ in range(1000):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        best = min(best, time.perf_counter() - start)
        if time.perf_counter() > end:
            break
    return best


def measure_recorded(run: Callable[[], object], device: torch.device, calls: int, budget: float = 0.5) -> float:
    """Measure one of `calls` consecutive calls; on a GPU they are one CUDA graph, which excludes Python's overhead."""
    if device.type != "cuda":
        return measure(run, device, budget)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return measure(graph.replay, device, budget) / calls


def ceilings(device: torch.device, dtype: torch.dtype) -> list[Figure]:
    """Measure the fastest copy (bytes read and written) and matrix product of torch on this machine.

    GPU sizes are so large that no cache holds the copy, and launch overhead is negligible.
    """
    size, side = (1 << 30, 8192) if device.type == "cuda" else (1 << 26, 2048)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = measure(lambda: target.copy_(source), device)
    matrix = torch.randn(side, side, device=device).to(dtype)
    product = measure(lambda: matrix @ matrix, device)
    return [Figure("copy", copy, 2.0 * size, "GB/s"), Figure("matmul", product, 2.0 * side**3, "GFLOP/s")]


def figures(device: torch.device, dtype: torch.dtype, backend: str) -> Iterator[Figure]:
    """Measure operations at the sizes of an 8B model."""
    yield _decode(device, dtype, backend)
    yield _prefill(device, dtype, backend)
    hidden, size = torch.randn(512, 4096, device=device).to(dtype), dtype.itemsize
    weight = torch.ones(4096, dtype=dtype, device=device)
    norm = measure(lambda: add_rmsnorm(hidden, hidden, weight, 1e-5), device)
    yield Figure("add_rmsnorm", norm, 4.0 * hidden.numel() * size, "GB/s")
    gate_up = torch.randn(512, 2 * 14336, device=device).to(dtype)
    yield Figure("silu_and_mul", measure(lambda: silu_and_mul(gate_up), device), 1.5 * gate_up.numel() * size, "GB/s")
    q = torch.randn(512, HEADS, HEAD_DIM, device=device).to(dtype)
    k = q[:, :KV_HEADS].contiguous()
    table, positions = rope_cache(512, HEAD_DIM, 5e5).to(device), torch.arange(512, device=device)
    rope = measure(lambda: apply_rope(q, k, positions, table), device)
    yield Figure("rope", rope, 2.0 * (q.numel() + k.numel()) * size, "GB/s")
    many, values = k.repeat(8, 1, 1), k.repeat(8, 1, 1)  # exceeds a processor's caches
    shape = (2, len(many) // PAGE_SIZE, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    k_cache, v_cache = torch.zeros(shape, dtype=dtype, device=device)
    slots = torch.arange(len(many), device=device)
    store = measure(lambda: store_kv(many, values, k_cache, v_cache, slots), device)
    yield Figure("store_kv", store, 4.0 * many.numel() * size, "GB/s")
    yield from _sampling(device)


def _decode(device: torch.device, dtype: torch.dtype, name: str, rows: int = 8, kv_len: int = 1024) -> Figure:
    run, cache_bytes = _attention(device, dtype, name, [(1, kv_len)] * rows)
    return Figure(f"decode, {rows} x {kv_len} tokens", measure(run, device), cache_bytes, "GB/s")


def _prefill(device: torch.device, dtype: torch.dtype, name: str, tokens: int = 1024) -> Figure:
    run, _ = _attention(device, dtype, name, [(tokens, tokens)])
    seen = tokens * (tokens + 1) / 2
    return Figure(f"prefill, {tokens} tokens", measure(run, device), 4.0 * HEADS * HEAD_DIM * seen, "GFLOP/s")


def _attention(
    device: torch.device, dtype: torch.dtype, name: str, rows: list[tuple[int, int]]
) -> tuple[Callable[[], object], float]:
    """Return (a call, the bytes of keys and values that it reads)."""
    batch = make_batch(rows, PAGE_SIZE, device)
    pages = int(batch.page_table.max()) + 1
    k, v = torch.randn(2, pages, PAGE_SIZE, KV_HEADS, HEAD_DIM, device=device).to(dtype).unbind()
    q = torch.randn(sum(batch.host_query_lens), HEADS, HEAD_DIM, device=device).to(dtype)
    backend = attention_backend(name, device)()
    backend.plan(batch)
    params = AttentionParams(scale=HEAD_DIM**-0.5)
    return lambda: backend.attend(q, k, v, params), 2.0 * k.numel() * dtype.itemsize


def _sampling(device: torch.device, rows: int = 4) -> Iterator[Figure]:
    logits = torch.randn(rows, VOCAB, device=device) * 3
    size = 4.0 * logits.numel()
    temperature = torch.ones(rows, device=device)
    noise = NoiseKey(*torch.arange(4 * rows, device=device).view(4, rows))
    filters = Filters(
        torch.zeros(rows, dtype=torch.int64, device=device), temperature * 0.9, torch.zeros(rows, device=device)
    )
    native = device.type == "cpu" and not missing_library()
    ops = NativeOps(load_library()) if native else sampling
    yield Figure("largest", measure(lambda: ops.argmax_with_values(logits), device), size, "GB/s")
    nucleus = measure(lambda: ops.sample(logits, temperature, filters, noise), device)
    yield Figure("sample top-p", nucleus, size, "GB/s")
    yield Figure("sample all", measure(lambda: ops.sample(logits, temperature, None, noise), device), size, "GB/s")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
