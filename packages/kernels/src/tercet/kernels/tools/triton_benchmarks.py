"""Benchmarks of the fused operations on a GPU, at sizes above any L2 cache, for `tercet-kernels bench`."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from tercet.kernels.attention.api import AttentionParams
from tercet.kernels.attention.latent import latent_caches
from tercet.kernels.attention.triton import TritonAttention
from tercet.kernels.attention.triton_latent import TritonLatent
from tercet.kernels.ops.lora import LONGEST_RUN, LoRARows, LoRAWeights, Segment
from tercet.kernels.ops.penalties import Penalties, TokenCounts
from tercet.kernels.ops.philox import NoiseKey
from tercet.kernels.ops.projection import Norm
from tercet.kernels.ops.quantized import Format, quantize
from tercet.kernels.ops.recurrent import DeltaInputs, ScanInputs, Segments
from tercet.kernels.ops.recurrent import Segment as StateSegment
from tercet.kernels.ops.sampling import Filters
from tercet.kernels.tools.bench import HEAD_DIM, HEADS, KV_HEADS, PAGE_SIZE, Figure, measure_recorded
from tercet.kernels.tools.check import make_batch
from tercet.kernels.triton.activation import silu_and_mul
from tercet.kernels.triton.attention.rope import rope_store
from tercet.kernels.triton.embedding import embedding
from tercet.kernels.triton.linear.lora import add_lora
from tercet.kernels.triton.linear.projection import project, project_normed
from tercet.kernels.triton.linear.quantized import linear_quantized
from tercet.kernels.triton.moe.moe import fused_moe
from tercet.kernels.triton.recurrent.delta_rule import gated_delta_rule
from tercet.kernels.triton.recurrent.scan import state_space_scan
from tercet.kernels.triton.rmsnorm import add_rmsnorm
from tercet.kernels.triton.sampling.argmax import argmax_with_values
from tercet.kernels.triton.sampling.bitmask import apply_bitmask_
from tercet.kernels.triton.sampling.logprobs import token_logprobs
from tercet.kernels.triton.sampling.penalties import apply_penalties_
from tercet.kernels.triton.sampling.sampling import sample

_CALLS = 20
QUANTISED: list[tuple[Format, tuple[int, int]]] = [("fp8", (128, 128)), ("int8", (1, 1 << 30)), ("int4", (1, 128))]


def fused_figures(
    device: torch.device,
    dtype: torch.dtype,
    *,
    tokens: int = 16384,
    hidden: int = 4096,
    vocab: int = 128_256,
    rows: int = 64,
    context: int = 4096,
) -> Iterator[Figure]:
    """Measure each operation on `tokens` tokens of a model of width `hidden`; sampling on `rows`, linear layers on 16.

    Attention decodes `rows` of `context` tokens, and extends one prompt of `context`.
    """
    size = dtype.itemsize
    x, weight = torch.randn(tokens, hidden, device=device).to(dtype), torch.ones(hidden, device=device, dtype=dtype)
    residual = x.clone()
    norm = _seconds(lambda: add_rmsnorm(x, residual, weight, 1e-5), device)
    yield Figure("fused add_rmsnorm", norm, 4.0 * x.numel() * size, "GB/s")
    gate_up = torch.randn(tokens, 2 * hidden, device=device).to(dtype)
    act = _seconds(lambda: silu_and_mul(gate_up), device)
    yield Figure("fused silu_and_mul", act, 1.5 * gate_up.numel() * size, "GB/s")
    ids = torch.arange(tokens, device=device)
    look_up = _seconds(lambda: embedding(ids, x), device)
    yield Figure("fused embedding", look_up, 2.0 * x.numel() * size, "GB/s")
    yield _rope(device, dtype, tokens)
    yield from _attention(device, dtype, rows, context)
    yield from _latent(device, dtype, rows, context)
    yield from _sampling(device, vocab, rows)
    yield from _linear(x)
    yield _moe(device, dtype, tokens // 8, hidden // 4)
    yield _moe_token(device, dtype, hidden // 2, hidden * 3 // 16)
    yield from _recurrent(device, dtype, 4 * rows, tokens // 2)
    yield _lora(x[:rows], [Segment(row, row, row + 1) for row in range(rows)], "an adapter each")
    starts = range(0, tokens, LONGEST_RUN)
    yield _lora(x, [Segment(0, start, min(start + LONGEST_RUN, tokens)) for start in starts], "one adapter")


def _linear(x: torch.Tensor) -> Iterator[Figure]:
    """Measure layers with a weight that no cache holds: unquantized for one row, quantized for one and for 16."""
    size = x.shape[1]
    full = torch.randn(16 * size, size, device=x.device)
    weight = full.to(x.dtype)
    amount = 1.0 * weight.numel() * weight.itemsize
    yield Figure("fused linear, 1 row", _seconds(lambda: project(x[:1], weight), x.device), amount, "GB/s")
    norm = Norm(x[0], 1e-5)
    seconds = _seconds(lambda: project_normed(x[:1], None, norm, weight, gate="silu"), x.device)
    yield Figure("fused linear of a norm, gated, 1 row", seconds, amount, "GB/s")
    for kind, block in QUANTISED:
        packed = quantize(full, kind, block)
        for rows in (1, 16):
            seconds = _seconds(partial(linear_quantized, x[:rows], packed), x.device)
            yield Figure(f"fused {kind} linear, {rows} row{'s' * (rows > 1)}", seconds, 1.0 * packed.nbytes, "GB/s")


def _rope(device: torch.device, dtype: torch.dtype, tokens: int) -> Figure:
    projection = torch.randn(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM, device=device).to(dtype)
    q, k, v = torch.split(projection, [HEADS, KV_HEADS, KV_HEADS], 1)
    pages = -(-tokens // PAGE_SIZE)
    keys, values = torch.zeros(2, pages, PAGE_SIZE, KV_HEADS, HEAD_DIM, device=device, dtype=dtype).unbind()
    table, index = torch.randn(tokens, HEAD_DIM, device=device), torch.arange(tokens, device=device)
    seconds = _seconds(lambda: rope_store(q, k, v, index, table, keys, values, index), device)
    return Figure("fused rope_store", seconds, 2.0 * projection.numel() * dtype.itemsize, "GB/s")


def _attention(device: torch.device, dtype: torch.dtype, rows: int, context: int) -> Iterator[Figure]:
    cached = 2.0 * rows * context * KV_HEADS * HEAD_DIM * dtype.itemsize
    yield Figure("fused decode", _attending(device, dtype, [(1, context)] * rows), cached, "GB/s")
    seen = 4.0 * HEADS * HEAD_DIM * context * (context + 1) / 2
    yield Figure("fused extend", _attending(device, dtype, [(context, context)]), seen, "GFLOP/s")


def _attending(device: torch.device, dtype: torch.dtype, batch_rows: list[tuple[int, int]]) -> float:
    batch = make_batch(batch_rows, PAGE_SIZE, device)
    pages = int(batch.page_table.max()) + 1
    k, v = torch.randn(2, pages, PAGE_SIZE, KV_HEADS, HEAD_DIM, device=device).to(dtype).unbind()
    q = torch.randn(sum(batch.host_query_lens), HEADS, HEAD_DIM, device=device).to(dtype)
    backend = TritonAttention()
    backend.plan(batch)
    params = AttentionParams(scale=HEAD_DIM**-0.5)
    return _seconds(lambda: backend.attend(q, k, v, params), device)


def _latent(device: torch.device, dtype: torch.dtype, rows: int, context: int) -> Iterator[Figure]:
    """Measure the sizes of DeepSeek-V2-Lite: 16 heads over vectors of 512 + 64 elements."""
    heads, rank, width = 16, 512, 576
    seconds, params = [], AttentionParams(scale=width**-0.5)
    for batch_rows in ([(1, context)] * rows, [(context, context)]):
        batch = make_batch(batch_rows, PAGE_SIZE, device)
        cache = torch.randn(int(batch.page_table.max()) + 1, PAGE_SIZE, width, device=device).to(dtype)
        q = torch.randn(sum(batch.host_query_lens), heads, width, device=device).to(dtype)
        backend = TritonLatent()
        backend.plan(batch)
        seconds.append(_seconds(partial(backend.attend, q, *latent_caches(cache, rank), params), device))
    yield Figure("fused latent decode", seconds[0], 1.0 * rows * context * width * dtype.itemsize, "GB/s")
    seen = 2.0 * heads * (width + rank) * context * (context + 1) / 2
    yield Figure("fused latent extend", seconds[1], seen, "GFLOP/s")


def _sampling(device: torch.device, vocab: int, rows: int) -> Iterator[Figure]:
    logits = torch.randn(rows, vocab, device=device) * 3
    size = 4.0 * logits.numel()
    one, zero = torch.ones(rows, device=device), torch.zeros(rows, dtype=torch.int64, device=device)
    noise = NoiseKey(*torch.arange(4 * rows, device=device).view(4, rows))
    top_p = Filters(zero, one * 0.9, one * 0)
    both = Filters(zero + 20, one * 0.8, one * 0)
    yield Figure("fused largest", _seconds(lambda: argmax_with_values(logits), device), size, "GB/s")
    yield Figure("fused logprobs", _seconds(lambda: token_logprobs(logits, zero, 0), device), size, "GB/s")
    yield Figure("fused sample all", _seconds(lambda: sample(logits, one, None, noise), device), size, "GB/s")
    yield Figure("fused sample top-p", _seconds(lambda: sample(logits, one, top_p, noise), device), size, "GB/s")
    yield Figure("fused sample top-k, top-p", _seconds(lambda: sample(logits, one, both, noise), device), size, "GB/s")
    mask = torch.zeros(rows, -(-vocab // 32), dtype=torch.int32, device=device)
    mask[:, ::16] = 1  # the grammar allows one of 512 tokens: logits are written, and hardly read
    yield Figure("fused grammar mask", _seconds(lambda: apply_bitmask_(logits, mask), device), size, "GB/s")
    yield _penalties(logits)


def _penalties(logits: torch.Tensor) -> Figure:
    rows, vocab = logits.shape
    said = torch.zeros(rows, vocab, dtype=torch.int32, device=logits.device)
    counts, one, who = TokenCounts(said, said.bool()), torch.ones(rows, device=logits.device), torch.arange(rows)
    strengths, who = Penalties(repetition=one, frequency=one, presence=one), who.to(logits.device)
    seconds = _seconds(lambda: apply_penalties_(logits, who, counts, who, strengths), logits.device)
    return Figure("fused penalties", seconds, (4.0 + 4 + 4 + 1) * logits.numel(), "GB/s")


def _moe(device: torch.device, dtype: torch.dtype, tokens: int, hidden: int) -> Figure:
    """Measure two of eight experts for each token."""
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    gate_up = torch.randn(8, 4 * hidden, hidden, device=device).to(dtype)
    down = torch.randn(8, hidden, 2 * hidden, device=device).to(dtype)
    experts = torch.arange(2 * tokens, device=device).view(tokens, 2) % 8
    weights = torch.full((tokens, 2), 0.5, device=device)
    seconds = _seconds(lambda: fused_moe(x, weights, experts, gate_up, down), device)
    return Figure("fused moe", seconds, 2.0 * 2 * tokens * 6 * hidden * hidden, "GFLOP/s")


def _moe_token(device: torch.device, dtype: torch.dtype, hidden: int, size: int) -> Figure:
    """Measure 8 of 16 experts for one token, by the weights read."""
    gate_up = torch.randn(16, 2 * size, hidden, device=device).to(dtype)
    down = torch.randn(16, hidden, size, device=device).to(dtype)
    experts = torch.arange(0, 16, 2, device=device)[None]
    given = torch.randn(1, hidden, device=device).to(dtype), torch.full((1, 8), 0.125, device=device), experts
    seconds = _seconds(lambda: fused_moe(*given, gate_up, down), device)
    return Figure("fused moe, 1 token", seconds, (gate_up.nbytes + down.nbytes) / 2, "GB/s")


def _recurrent(device: torch.device, dtype: torch.dtype, rows: int, tokens: int) -> Iterator[Figure]:
    """Measure Gated DeltaNet with 2 value heads to a key head, and Mamba 2: decodes by the states that are read and
    written, and a prompt by its arithmetic, token by token.
    """
    size = HEAD_DIM
    states = torch.zeros(rows, HEADS, size, size, device=device)
    decodes = Segments(torch.arange(rows), [], device=device)
    prompt = Segments(torch.empty(0, dtype=torch.int64), [StateSegment(0, tokens, 0)], device=device)
    for name, count, segments in (("decode", rows, decodes), ("prompt", tokens, prompt)):
        q, k = torch.randn(2, count, HEADS // 2, size, device=device).to(dtype).unbind()
        v = torch.randn(count, HEADS, size, device=device).to(dtype)
        rates = -torch.rand(count, HEADS, device=device)
        steps = DeltaInputs(q, k, v, rates, -rates), ScanInputs(q, k, v.float(), rates)
        delta = _seconds(partial(gated_delta_rule, steps[0], states, segments), device)
        scan = _seconds(partial(state_space_scan, steps[1], states, segments), device)
        for op, seconds, products in (("delta rule", delta, 7), ("scan", scan, 5)):
            if name == "decode":
                yield Figure(f"fused {op}, decode", seconds, 2.0 * states.nbytes, "GB/s")
            else:
                yield Figure(f"fused {op}, prompt", seconds, 1.0 * products * count * HEADS * size**2, "GFLOP/s")


def _lora(x: torch.Tensor, runs: list[Segment], what: str) -> Figure:
    """Measure rank-64 adapters of queries, keys and values: adapters and inputs are read once, outputs updated."""
    rank, size, places = 64, x.shape[1], max(run.slot for run in runs) + 1
    parts = (size, size // 4, size // 4)
    a = torch.randn(places, len(parts) * rank, size, device=x.device).to(x.dtype)
    b = torch.randn(places, rank, sum(parts), device=x.device).to(x.dtype)
    longest = max(run.stop - run.start for run in runs)
    rows = LoRARows(runs, torch.tensor(runs, dtype=torch.int32, device=x.device), [rank] * places, longest)
    weights, out = LoRAWeights(a, b, parts), x.new_zeros(len(x), sum(parts))
    seconds = _seconds(lambda: add_lora(out, x, weights, rows), x.device)
    return Figure(f"fused lora, {what}", seconds, 1.0 * a.nbytes + b.nbytes + x.nbytes + 2 * out.nbytes, "GB/s")


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Measure one call, in seconds."""
    return measure_recorded(run, device, _CALLS)
