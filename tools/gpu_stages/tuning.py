"""Tuning of memory-bound operations: every tiling in the `TILINGS` of their modules, checked and timed.

The checks come first, against the references and in several processes, which also compile the kernels into Triton's
cache on disk, so that the measuring process compiles nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from tercet.kernels.attention import triton as attention
from tercet.kernels.attention import triton_latent
from tercet.kernels.attention.api import AttentionBackend, AttentionBatch, AttentionParams
from tercet.kernels.attention.latent import latent_caches
from tercet.kernels.attention.torch_native import TorchNativeAttention, TorchNativeLatent
from tercet.kernels.errors import DeviceFailedError
from tercet.kernels.ops import logprobs as logprobs_reference
from tercet.kernels.ops import quantized as quantised_reference
from tercet.kernels.ops import sampling as sampling_reference
from tercet.kernels.ops.philox import NoiseKey
from tercet.kernels.ops.rope import apply_rope, rope_cache
from tercet.kernels.ops.store_kv import store_kv
from tercet.kernels.tools.bench import PAGE_SIZE, measure_recorded
from tercet.kernels.tools.check import Pair, make_batch, verdict
from tercet.kernels.tools.triton_benchmarks import QUANTISED
from tercet.kernels.triton import embedding
from tercet.kernels.triton.attention import rope
from tercet.kernels.triton.launch import Tiling
from tercet.kernels.triton.linear import dequantize
from tercet.kernels.triton.linear import quantized as quantised
from tercet.kernels.triton.linear import quantized_gemv as quantised_row
from tercet.kernels.triton.sampling import argmax, logprobs, sampling
from tools.gpu_stages.kernels import ceilings_of
from tools.gpu_stages.processes import NOT_RUN, gathered, words
from tools.gpu_stages.scale import Results, Scale
from tools.gpu_stages.ways import time_ways

_CALLS = 100
"""Calls in one graph, so that its launch does not count."""
_BUDGET = 0.04
"""Seconds of one measurement."""

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class _Work:
    """An operation at one size: its function of a tiling, the expected results, and the bytes that it moves."""

    size: str
    run: Callable[..., Tensors]
    expected: Tensors
    amount: float
    stores: Tensors = ()
    """Tensors it writes to besides its results, zero before; they come last in `expected`."""


def _embedding(scale: Scale) -> Iterator[_Work]:
    weight = torch.randn(scale.operation_tokens, scale.operation_width, device=scale.device).to(scale.dtype)
    for size, tokens in _sizes(scale):
        ids = torch.arange(tokens, device=scale.device)
        run = partial(_one, embedding.embedding, ids, weight)
        yield _Work(size, run, [weight[ids]], 2.0 * tokens * weight[0].nbytes)


def _rope(scale: Scale) -> Iterator[_Work]:
    shape, most = scale.large, scale.operation_tokens
    parts, pages = [shape.heads, shape.kv_heads, shape.kv_heads], -(-most // PAGE_SIZE)
    table = rope_cache(most, shape.head_dim, 5e5).to(scale.device)
    for size, tokens in _sizes(scale):
        given = torch.randn(tokens, sum(parts), shape.head_dim, device=scale.device).to(scale.dtype)
        q, k, v = torch.split(given, parts, 1)
        index = torch.arange(tokens, device=scale.device)
        caches, wanted = given.new_zeros(2, 2, pages, PAGE_SIZE, shape.kv_heads, shape.head_dim).unbind()
        rotated, keys = apply_rope(q, k, index, table)
        store_kv(keys, v, wanted[0], wanted[1], index)
        run = partial(_one, rope.rope_store, q, k, v, index, table, *caches, index)
        yield _Work(size, run, [rotated, *wanted], 2.0 * given.nbytes, list(caches))


def _decodes(scale: Scale) -> Iterator[_Work]:
    """Yield decodes of one layer. With few rows the data is in the L2 cache from the second call on."""
    shape, dim = scale.large, scale.large.head_dim
    for count in scale.batches:
        rows = make_batch([(1, scale.context)] * count, PAGE_SIZE, scale.device)
        pages = int(rows.page_table.max()) + 1
        caches = torch.randn(2, pages, PAGE_SIZE, shape.kv_heads, dim, device=scale.device).to(scale.dtype)
        q = torch.randn(count, shape.heads, dim, device=scale.device).to(scale.dtype)
        expected = _attended(TorchNativeAttention(), rows, q, caches)
        backends: dict[Tiling, AttentionBackend] = {}  # a graph's counters are allocated before it is recorded
        yield _Work(f"batch {count}", partial(_decoded, backends, rows, q, caches), expected, 1.0 * caches.nbytes)


def _prompts(scale: Scale) -> Iterator[_Work]:
    """Yield prompts of one layer: without a cached prefix, and after one.

    They are bound by matrix products: the share of the copy bandwidth is small.
    """
    shape, dim, half = scale.large, scale.large.head_dim, scale.prompt // 2
    for size, row in ((f"prompt {half}", (half, half)), (f"{half // 2} after {half}", (half // 2, half // 2 + half))):
        batch = make_batch([row], PAGE_SIZE, scale.device)
        pages = int(batch.page_table.max()) + 1
        caches = torch.randn(2, pages, PAGE_SIZE, shape.kv_heads, dim, device=scale.device).to(scale.dtype)
        q = torch.randn(row[0], shape.heads, dim, device=scale.device).to(scale.dtype)
        expected = _attended(TorchNativeAttention(), batch, q, caches)
        yield _Work(size, partial(_extended, batch, q, caches), expected, 1.0 * caches.nbytes)


def _extended(*given: Any, tiling: Tiling) -> Tensors:
    return _attended(attention.TritonAttention(extends=tiling), *given)


def _decoded(backends: dict[Tiling, AttentionBackend], *given: Any, tiling: Tiling) -> Tensors:
    return _attended(backends.setdefault(tiling, attention.TritonAttention(tiling)), *given)


def _attended(backend: AttentionBackend, rows: AttentionBatch, q: torch.Tensor, caches: torch.Tensor) -> Tensors:
    backend.plan(rows)
    return [backend.attend(q, caches[0], caches[1], AttentionParams(scale=q.shape[2] ** -0.5))]


def _latent_decodes(scale: Scale) -> Iterator[_Work]:
    for count in scale.batches:
        work = _latents(scale, [(1, scale.context)] * count, lambda way: triton_latent.TritonLatent(decodes=way))
        yield replace(work, size=f"batch {count}")


def _latent_prompts(scale: Scale) -> Iterator[_Work]:
    """Yield prompts, which are bound by matrix products: their bytes alone are a small share."""
    for count in (scale.context, scale.prompt // 2):
        work = _latents(scale, [(count, count)], lambda way: triton_latent.TritonLatent(extends=way))
        yield replace(work, size=f"prompt {count}")


def _latents(scale: Scale, rows: list[tuple[int, int]], make: Callable[[Tiling], AttentionBackend]) -> _Work:
    """Return one layer of DeepSeek-V2-Lite, as in the stage `operations`."""
    heads, rank, width = 16, 512, 576
    batch = make_batch(rows, PAGE_SIZE, scale.device)
    pages = int(batch.page_table.max()) + 1
    cache = torch.randn(pages, PAGE_SIZE, width, device=scale.device).to(scale.dtype)
    q = torch.randn(sum(batch.host_query_lens), heads, width, device=scale.device).to(scale.dtype)
    backends: dict[Tiling, AttentionBackend] = {}

    def attended(backend: AttentionBackend) -> Tensors:
        backend.plan(batch)
        return [backend.attend(q, *latent_caches(cache, rank), AttentionParams(scale=width**-0.5))]

    def run(tiling: Tiling) -> Tensors:
        return attended(backends.setdefault(tiling, make(tiling)))

    return _Work("", run, attended(TorchNativeLatent()), 1.0 * cache.nbytes)


def _largest(scale: Scale) -> Iterator[_Work]:
    for size, logits in _logits(scale):
        yield _Work(
            size,
            partial(argmax.argmax_with_values, logits),
            sampling_reference.argmax_with_values(logits),
            logits.nbytes,
        )


def _logprobs(scale: Scale) -> Iterator[_Work]:
    for size, logits in _logits(scale):
        tokens = torch.arange(len(logits), device=scale.device) % logits.shape[1]
        expected = logprobs_reference.token_logprobs(logits, tokens, 0)
        yield _Work(size, partial(logprobs.token_logprobs, logits, tokens, 0), expected, logits.nbytes)


def _sample(scale: Scale) -> Iterator[_Work]:
    for size, logits in _logits(scale):
        rows = len(logits)
        one, noise = logits.new_ones(rows).float(), NoiseKey(*torch.arange(4 * rows, device=scale.device).view(4, rows))
        expected = [sampling_reference.sample(logits, one, None, noise)]
        yield _Work(size, partial(_one, sampling.sample, logits, one, None, noise), expected, logits.nbytes)


def _few_bits(scale: Scale, rows: Sequence[int], run: Callable[..., torch.Tensor]) -> Iterator[_Work]:
    """Yield layers with weights of each kind, too many for a cache: in 4 bits twice an H100's."""
    width = scale.operation_width
    full = torch.randn(12 * width, width, device=scale.device).div(width**0.5)
    for kind, block in QUANTISED:
        weight = quantised_reference.quantize(full, kind, block)
        for count in rows:
            x = torch.randn(count, width, device=scale.device).to(scale.dtype)
            expected = quantised_reference.linear_quantized(x, weight)
            call = partial(_one, run, x, weight, None)
            yield _Work(f"{kind}, {count} rows", call, [expected], weight.nbytes)


def _sizes(scale: Scale) -> Iterator[tuple[str, int]]:
    """Yield token counts of decodes, and those of the stage `operations`."""
    yield from ((f"batch {batch}", batch) for batch in scale.batches)
    yield f"{scale.operation_tokens} tokens", scale.operation_tokens


def _logits(scale: Scale) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield logits of decodes in the model's type, and those of the stage `operations`."""
    for rows in scale.batches:
        yield f"batch {rows}", torch.randn(rows, scale.large.vocab, device=scale.device).mul(3).to(scale.dtype)
    most = scale.operation_rows
    yield f"{most} rows, float32", torch.randn(most, scale.large.vocab, device=scale.device) * 3


def _one(operation: Callable[..., torch.Tensor], *given: Any, tiling: Tiling) -> Tensors:
    """Return the result of an operation with one tensor as a tuple."""
    return [operation(*given, tiling=tiling)]


OPERATIONS: dict[str, tuple[Sequence[Tiling], Callable[[Scale], Iterator[_Work]]]] = {
    "embedding": (embedding.TILINGS, _embedding),
    "rope_store": (rope.TILINGS, _rope),
    "decode": (attention.DECODE_TILINGS, _decodes),
    "prompt": (attention.EXTEND_TILINGS, _prompts),
    "latent decode": (triton_latent.DECODE_TILINGS, _latent_decodes),
    "latent prompt": (triton_latent.EXTEND_TILINGS, _latent_prompts),
    "largest": (argmax.TILINGS, _largest),
    "logprobs": (logprobs.TILINGS, _logprobs),
    "sample all": (sampling.TILINGS, _sample),
    "row, few bits": (quantised_row.TILINGS, lambda scale: _few_bits(scale, [1], quantised_row.gemv)),
    "tiles, few bits": (quantised.TILINGS, lambda scale: _few_bits(scale, scale.tiled_rows, quantised.tiled_linear)),
    "in full, few bits": (dequantize.TILINGS, lambda scale: _few_bits(scale, scale.tiled_rows, quantised.full_linear)),
}
"""`quantised._TILED_ROWS` is the row count above which tiles are slower than a dequantized weight."""


def tuning(scale: Scale) -> Iterator[Results]:
    """Yield each operation at each size, fastest first: microseconds per call, and share of the copy bandwidth.

    First come the ways of 8-bit products, from which `choices_of` makes the table that serving reads.
    """
    yield from gathered(partial(time_ways, scale), ["ways"], min(1, scale.processes))
    ways = [(name, tiling) for name, (tilings, _) in OPERATIONS.items() for tiling in tilings]
    right: dict[str, list[Tiling]] = {}
    for said in words(partial(_verdict, scale), ways, scale.processes):
        checks = {f"{name} {tiling}": word for (name, tiling), word in said.items()}
        yield {"checks": checks, "wrong": sorted(way for way, word in checks.items() if word not in ("ok", NOT_RUN))}
        right = {name: [tiling for tiling in OPERATIONS[name][0] if said[name, tiling] == "ok"] for name in OPERATIONS}
    copy = ceilings_of(scale)["copy_gb_per_s"] * 1e9
    yield from gathered(partial(_measured, scale, copy, right), OPERATIONS, min(1, scale.processes))


def _measured(scale: Scale, copy: float, right: Mapping[str, Sequence[Tiling]], name: str) -> Iterator[Results]:
    """Yield an operation with every correct tiling."""
    tilings, works = OPERATIONS[name]
    with torch.inference_mode():
        for work in works(scale):
            times = {tiling: _timed(work, tiling, scale) for tiling in right[name]}
            rows = [
                {
                    "tiling": str(tiling),
                    "us": seconds * 1e6,
                    "share": work.amount / seconds / copy,
                    "in_use": tiling == tilings[0],
                }
                for tiling, seconds in sorted(times.items(), key=lambda item: item[1])
            ]
            _say(f"{name}, {work.size}", rows)
            yield {work.size: rows}


def _timed(work: _Work, tiling: Tiling, scale: Scale) -> float:
    return measure_recorded(partial(work.run, tiling=tiling), scale.device, _CALLS, _BUDGET)


def _verdict(scale: Scale, way: tuple[str, Tiling]) -> str:
    """Return "ok" if an operation is correct with a tiling at every size, or why it is not."""
    name, tiling = way
    torch.manual_seed(0)
    with torch.inference_mode():
        for work in OPERATIONS[name][1](scale):
            try:
                trouble = verdict(partial(_pair, work, tiling))
            except DeviceFailedError as error:
                raise DeviceFailedError(f"{work.size}: {error}") from error
            if trouble:
                return f"{work.size}: {trouble}"
    return "ok"


def _pair(work: _Work, tiling: Tiling) -> Pair:
    """Return the actual and expected results and stores; for integers, whether they are equal."""
    given = [*work.run(tiling=tiling), *work.stores]
    pairs = [
        (mine, wanted) if wanted.is_floating_point() else (mine == wanted, torch.ones_like(wanted, dtype=torch.bool))
        for mine, wanted in zip(given, work.expected, strict=True)
    ]
    actual, expected = (torch.cat([part.flatten() for part in parts]) for parts in zip(*pairs, strict=True))
    return actual, expected


def _say(title: str, rows: list[Results]) -> None:
    print(title)
    for row in rows:
        mark = "  in use" if row["in_use"] else ""
        print(f"  {row['tiling']:12} {row['us']:9.1f} us {row['share']:7.1%}{mark}", flush=True)
