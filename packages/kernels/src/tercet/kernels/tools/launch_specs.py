"""Calls of each operation as a server of an 8B model makes them, in every variant that compiles another kernel."""

from collections.abc import Callable
from functools import partial

import torch

from tercet.kernels.attention.api import AttentionParams, NewTokens
from tercet.kernels.attention.latent import LatentSizes, latent_caches
from tercet.kernels.attention.triton import EXTEND_TILINGS, TritonAttention
from tercet.kernels.attention.triton_latent import TritonLatent, missing_memory
from tercet.kernels.errors import UnavailableBackendError
from tercet.kernels.ops.activation import Gate
from tercet.kernels.ops.lora import LoRARows, LoRAWeights
from tercet.kernels.ops.moe import ExpertBiases, ExpertWeights, QuantizedExperts, Routing
from tercet.kernels.ops.penalties import Penalties, TokenCounts
from tercet.kernels.ops.philox import NoiseKey
from tercet.kernels.ops.projection import Norm, Weight
from tercet.kernels.ops.quantized import MXFP4_BLOCK, PACKED, EightBits, Format, QuantizedWeight
from tercet.kernels.ops.recurrent import DeltaInputs, ScanInputs, Segment, Segments, SelectiveInputs
from tercet.kernels.ops.sampling import Filters
from tercet.kernels.ops.store_kv import E4M3
from tercet.kernels.tools.check import make_batch
from tercet.kernels.triton import embedding
from tercet.kernels.triton.activation import gelu_and_mul, silu_and_mul
from tercet.kernels.triton.attention import rope
from tercet.kernels.triton.attention.latent_rope import latent_rope_store
from tercet.kernels.triton.launch import Tiling
from tercet.kernels.triton.linear import dequantize, quantized, quantized_gemv, rounding, turned
from tercet.kernels.triton.linear.lora import add_lora
from tercet.kernels.triton.linear.projection import project, project_adapted, project_normed, project_onto
from tercet.kernels.triton.moe import moe_gemv_quantized
from tercet.kernels.triton.moe.moe import fused_moe
from tercet.kernels.triton.moe.route import route
from tercet.kernels.triton.recurrent.causal_conv import causal_conv
from tercet.kernels.triton.recurrent.delta_rule import gated_delta_rule
from tercet.kernels.triton.recurrent.scan import state_space_scan
from tercet.kernels.triton.recurrent.selective import selective_scan
from tercet.kernels.triton.rmsnorm import add_rmsnorm, rmsnorm
from tercet.kernels.triton.sampling import argmax, logprobs, sampling
from tercet.kernels.triton.sampling.bitmask import apply_bitmask_
from tercet.kernels.triton.sampling.penalties import apply_penalties_

HEADS, KV_HEADS = 32, 8
HIDDEN, VOCAB = 4096, 128_256
QKV = (4096, 1024, 1024)
"""Outputs of the projections of queries, keys and values."""
BF16 = torch.bfloat16

DECODE = [(1, 1024)] * 4
EXTEND = [(200, 1000), (40, 40)]


def _attention(
    rows: list[tuple[int, int]],
    head_dim: int = 128,
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    window: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
    cached: torch.dtype | None = None,
    extends: Tiling | None = None,
) -> None:
    cpu = torch.device("cpu")
    batch = make_batch(rows, page_size, cpu)
    pages = int(batch.page_table.max()) + 1
    cache = torch.empty(pages, page_size, KV_HEADS, head_dim, dtype=cached or dtype)
    q = torch.empty(sum(batch.host_query_lens), HEADS, head_dim, dtype=dtype)
    backend = TritonAttention(extends=extends)
    backend.plan(batch)
    given = torch.zeros(HEADS, dtype=dtype) if sinks else None
    backend.attend(q, cache, cache, AttentionParams(scale=0.1, window=window, softcap=softcap, sinks=given))


def _latent(
    rows: list[tuple[int, int]],
    heads: int = 16,
    rank: int = 512,
    turned: int = 64,
    page_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    cached: torch.dtype | None = None,
) -> None:
    """Attend with the sizes of DeepSeek-V2-Lite, or of DeepSeek-V3 on one of eight GPUs.

    Raises UnavailableBackendError if such a kernel is never launched.
    """
    cpu = torch.device("cpu")
    if missing := missing_memory(cpu, LatentSizes(rank=rank, rope=turned, dtype=dtype, cached=cached or dtype)):
        raise UnavailableBackendError(missing)
    batch = make_batch(rows, page_size, cpu)
    cache = torch.empty(int(batch.page_table.max()) + 1, page_size, rank + turned, dtype=cached or dtype)
    backend = TritonLatent()
    backend.plan(batch)
    q = torch.empty(sum(batch.host_query_lens), heads, rank + turned, dtype=dtype)
    backend.attend(q, *latent_caches(cache, rank), AttentionParams(scale=0.1))


def _latent_rope(heads: int = 16, dtype: torch.dtype = BF16) -> None:
    """Rotate with the sizes of DeepSeek."""
    rank, rope = 512, 64
    q, new = torch.empty(4, heads, rank + rope, dtype=dtype), torch.empty(4, 3072 + rank + rope, dtype=dtype)[:, 3072:]
    turned, index = torch.empty(4, heads, 128 + rope, dtype=dtype)[..., 128:], torch.arange(4)
    norm, cache = Norm(torch.ones(rank, dtype=dtype), 1e-6), torch.empty(2, 64, 1, rank + rope, dtype=dtype)
    latent_rope_store(q, turned, new, norm, index, torch.zeros(64, rope), cache, index)


def _rope_decode(
    rows: list[tuple[int, int]],
    head_dim: int = 128,
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    window: int = 0,
    sinks: bool = False,
    norms: bool = False,
    cached: torch.dtype | None = None,
    weighs: torch.dtype | None = None,
) -> None:
    """Decode with rotation; `weighs` is the dtype of the norms' weights, if it differs."""
    batch = make_batch(rows, page_size, torch.device("cpu"))
    pages = int(batch.page_table.max()) + 1
    cache = torch.empty(pages, page_size, KV_HEADS, head_dim, dtype=cached or dtype)
    heads = torch.empty(len(rows), HEADS + 2 * KV_HEADS, head_dim, dtype=dtype)
    q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], 1)
    table, positions = torch.empty(64, head_dim), batch.slot_mapping
    weight = torch.empty(head_dim, dtype=weighs or dtype)
    weights = (weight, weight) if norms else None
    scales = (0.5, 0.5) if cached else (1.0, 1.0)
    new = NewTokens(k=k, v=v, positions=positions, table=table, norms=weights, eps=1e-6, scales=scales)
    backend = TritonAttention()
    backend.plan(batch)
    given = torch.zeros(HEADS, dtype=dtype) if sinks else None
    backend.attend_new(q, cache, cache, new, AttentionParams(scale=0.1, window=window, sinks=given))


def _rope(
    norms: bool, cached: torch.dtype = BF16, tiling: Tiling = rope.TILINGS[0], weighs: torch.dtype = BF16
) -> None:
    q, k, v = torch.empty(4, HEADS + 2 * KV_HEADS, 128, dtype=BF16).split([HEADS, KV_HEADS, KV_HEADS], 1)
    cache, table = torch.empty(2, 16, KV_HEADS, 128, dtype=cached), torch.empty(64, 128)
    index = torch.arange(4)
    weights = (torch.empty(128, dtype=weighs), torch.empty(128, dtype=weighs)) if norms else None
    rope.rope_store(q, k, v, index, table, cache, cache, index, norms=weights, eps=1e-6, tiling=tiling)


def _sample(filtered: bool, dtype: torch.dtype = BF16, tiling: Tiling = sampling.TILINGS[0]) -> None:
    one, zero = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    filters, noise = Filters(zero, one, one) if filtered else None, NoiseKey(zero, zero, zero, zero)
    sampling.sample(_logits(dtype), one, filters, noise, tiling=tiling)


def _penalties() -> None:
    one = torch.ones(2)
    penalties = Penalties(repetition=one, frequency=one, presence=one)
    counts = torch.zeros(2, VOCAB, dtype=torch.int32)
    known = TokenCounts(counts, counts.bool())
    apply_penalties_(_logits(torch.float32), torch.arange(2), known, torch.arange(2), penalties)


def _quantized(kind: Format, m: int, block: tuple[int, int], n: int = HIDDEN) -> None:
    quantized.linear_quantized(_hidden(m), _weight(kind, n, HIDDEN, block))


def _round(rows: int, kind: EightBits = "fp8", size: int = HIDDEN, width: int = 0, norm: bool = False) -> None:
    x = _hidden(rows, size)
    if norm:
        rounding.round_normed(x, x, Norm(x[0], 1e-5), kind, width or size)
    else:
        rounding.round_rows(x, kind, width or size)


def _scale_sums(dtype: torch.dtype, bias: bool = False) -> None:
    sums, scales, weight = torch.empty(32, 6144, dtype=dtype), torch.ones(32, 1), torch.ones(6144, 1)
    rounding.scale_sums(sums, scales, weight, _hidden(1, 6144)[0] if bias else None, BF16)


def _normed(gate: Gate | None = None, weighs: torch.dtype = BF16) -> None:
    project_normed(_hidden(1), None, Norm(_hidden(1)[0].to(weighs), 1e-5), _hidden(8), gate=gate)


def _adapted_row(norm: bool = False) -> None:
    adapters = LoRAWeights(torch.empty(2, 48, HIDDEN, dtype=BF16), torch.empty(2, 16, 6144, dtype=BF16), QKV)
    rows = LoRARows((), torch.zeros(1, 3, dtype=torch.int32), (), 16, torch.zeros(1, dtype=torch.int32))
    given, residual = (Norm(_hidden(1)[0], 1e-5), None) if norm else (None, _hidden(1, 6144))
    project_adapted(_hidden(1), _hidden(6144), None, adapters, rows, norm=given, residual=residual)


def _onto(weight: Weight) -> None:
    project_onto(_hidden(1), _hidden(1), weight)


def _weight(kind: Format, n: int, k: int, block: tuple[int, int] = (1, 128)) -> QuantizedWeight:
    dtype = torch.int8 if kind == "int8" else torch.uint8
    codes = torch.zeros(n, k // 2 if kind in PACKED else k, dtype=dtype)
    scales = torch.ones(-(-n // block[0]), -(-k // block[1]), dtype=torch.uint8 if kind == "mxfp4" else torch.float32)
    zeros = scales if kind == "int4" else None
    return QuantizedWeight(format=kind, codes=codes, scales=scales, zeros=zeros, block=block)


def _int4() -> QuantizedWeight:
    return _weight("int4", HIDDEN, HIDDEN)


def _moe(tokens: int, kind: Format | None = None, top_k: int = 2) -> None:
    experts = torch.zeros(tokens, top_k, dtype=torch.int64)
    gate_up: ExpertWeights = torch.empty(8, 512, 256, dtype=BF16)
    down: ExpertWeights = torch.empty(8, 256, 256, dtype=BF16)
    if kind is not None:
        gate_up, down = (
            QuantizedExperts(_weight(kind, 8 * 512, 256), 8),
            QuantizedExperts(_weight(kind, 8 * 256, 256), 8),
        )
    fused_moe(torch.empty(tokens, 256, dtype=BF16), torch.ones(tokens, top_k), experts, gate_up, down)


def _mxfp4_moe(tokens: int, dtype: torch.dtype = BF16, tiling: Tiling | None = None) -> None:
    """Run experts with the sizes of gpt-oss: 4 of 32, not powers of two."""
    size, count = 2880, 32
    gate_up, down = (QuantizedExperts(_weight("mxfp4", count * n, size, MXFP4_BLOCK), count) for n in (2 * size, size))
    biases = ExpertBiases(torch.empty(count, 2 * size, dtype=dtype), torch.empty(count, size, dtype=dtype))
    x, weights = torch.empty(tokens, size, dtype=dtype), torch.ones(tokens, 4)
    experts = torch.zeros(tokens, 4, dtype=torch.int64)
    if tiling is None:
        fused_moe(x, weights, experts, gate_up, down, gate="clamped", biases=biases)
    else:
        moe_gemv_quantized.few_tokens(x, weights, experts, gate_up, down, gate="clamped", biases=biases, tiling=tiling)


def _lora(
    runs: int,
    rank: int,
    parts: tuple[int, ...],
    dtype: torch.dtype = BF16,
    held: torch.dtype = BF16,
    longest: int = 1,
) -> None:
    a, b = torch.empty(2, len(parts) * rank, HIDDEN, dtype=held), torch.empty(2, rank, sum(parts), dtype=held)
    order = torch.zeros(runs, dtype=torch.int32)
    rows = LoRARows((), torch.zeros(runs, 3, dtype=torch.int32), (), longest, order)
    x, out = torch.empty(runs, HIDDEN, dtype=dtype), torch.empty(runs, sum(parts), dtype=dtype)
    add_lora(out, x, LoRAWeights(a, b, parts), rows)


def _hidden(tokens: int = 4, size: int = HIDDEN) -> torch.Tensor:
    return torch.empty(tokens, size, dtype=BF16)


def _logits(dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(2, VOCAB, dtype=dtype)


def _embedding(tiling: Tiling) -> None:
    embedding.embedding(torch.arange(4), _hidden(100), tiling=tiling)


def _argmax(tiling: Tiling) -> None:
    argmax.argmax_with_values(_logits(), tiling=tiling)


def _logprobs(tiling: Tiling, rows: torch.Tensor | None = None) -> None:
    logprobs.token_logprobs(_logits(), torch.zeros(2, dtype=torch.int64), 0, rows, tiling=tiling)


def _segments(tokens: int) -> Segments:
    """Return a decode, or a prompt in two segments."""
    if tokens == 1:
        return Segments(torch.zeros(1, dtype=torch.int64), [])
    cut = tokens // 2
    return Segments(torch.empty(0, dtype=torch.int64), [Segment(0, cut, 0, 1), Segment(cut, tokens, 0)])


def _delta_rule(tokens: int, by_channel: bool = False) -> None:
    """Advance states with the sizes of Qwen3-Next, or of Kimi-Linear."""
    key_heads, heads, size = (32 if by_channel else 16), 32, 128
    mixed = torch.empty(tokens, (2 * key_heads + heads) * size, dtype=BF16)
    q, k, v = mixed.split([key_heads * size, key_heads * size, heads * size], 1)
    decay = torch.zeros((tokens, heads, size) if by_channel else (tokens, heads))
    inputs = DeltaInputs(q.view(tokens, -1, size), k.view(tokens, -1, size), v.view(tokens, -1, size), decay, decay)
    states = torch.empty(2, heads, size, size)
    gated_delta_rule(inputs._replace(beta=torch.zeros(tokens, heads)), states, _segments(tokens))


def _scan(tokens: int) -> None:
    """Scan with the sizes of Nemotron 3 Nano."""
    mixed = torch.empty(tokens, 2 * 8 * 128, dtype=BF16)
    c, b = (each.view(tokens, 8, 128) for each in mixed.chunk(2, 1))
    states = torch.empty(2, 64, 64, 128)
    state_space_scan(ScanInputs(c, b, torch.empty(tokens, 64, 64), torch.zeros(tokens, 64)), states, _segments(tokens))


def _selective(tokens: int) -> None:
    """Scan with the sizes of Falcon-Mamba 7B."""
    c, b = torch.empty(tokens, 256 + 2 * 16, dtype=BF16)[:, 256:].chunk(2, 1)
    x, rates, states = torch.empty(tokens, 8192), torch.empty(8192, 16), torch.empty(2, 8192, 16)
    selective_scan(SelectiveInputs(c, b, x, x, rates), states, _segments(tokens))


def _conv(tokens: int, bias: bool = False, taps: int = 4) -> None:
    """Convolve with the sizes of Qwen3-Next."""
    x, channels = torch.empty(tokens, 12_288, dtype=BF16), 8192
    weight, states = torch.empty(channels, taps, dtype=BF16), torch.empty(2, channels, taps - 1, dtype=BF16)
    given = weight[:, 0].contiguous() if bias else None
    causal_conv(x[:, :channels], states, weight, given, _segments(tokens), silu=True)


CASES: dict[str, Callable[[], object]] = {
    "decode": partial(_attention, [(1, 1024)] * 2),
    "decode many splits": partial(_attention, [(1, 8192)]),
    "decode long rows": partial(_attention, [(1, 4096)] * 8),
    "decode one split": partial(_attention, [(1, 100)] * 4),
    "decode head 64": partial(_attention, DECODE, head_dim=64, page_size=1),
    "decode head 256": partial(_attention, DECODE, head_dim=256, softcap=50.0),
    "decode window, sinks": partial(_attention, DECODE, head_dim=64, page_size=64, window=128, sinks=True),
    "decode float32": partial(_attention, DECODE, dtype=torch.float32),
    "decode fp8": partial(_attention, DECODE, cached=E4M3),
    "latent decode": partial(_latent, [(1, 1024)] * 8),
    "latent decode many splits": partial(_latent, [(1, 8192)]),
    "latent decode long rows": partial(_latent, [(1, 4096)] * 64),
    "latent decode one split": partial(_latent, [(1, 100)] * 4),
    "latent decode 128 heads": partial(_latent, DECODE, heads=128),
    "latent decode odd sizes": partial(_latent, DECODE, heads=20, rank=320, turned=32, page_size=1),
    "latent decode float32": partial(_latent, DECODE, dtype=torch.float32),
    "latent decode fp8": partial(_latent, DECODE, cached=E4M3),
    "latent extend": partial(_latent, EXTEND),
    "latent extend 128 heads": partial(_latent, EXTEND, heads=128),
    "latent extend float32": partial(_latent, EXTEND, dtype=torch.float32),
    "latent extend fp8": partial(_latent, EXTEND, cached=E4M3),
    "rope decode": partial(_rope_decode, [(1, 1024)] * 2),
    "rope decode many splits": partial(_rope_decode, [(1, 8192)]),
    "rope decode long rows": partial(_rope_decode, [(1, 4096)] * 8),
    "rope decode long rows, fp8": partial(_rope_decode, [(1, 4096)] * 8, cached=E4M3),
    "rope decode one split": partial(_rope_decode, [(1, 100)] * 4),
    "rope decode window, sinks": partial(_rope_decode, DECODE, head_dim=80, page_size=1, window=128, sinks=True),
    "rope decode head 256": partial(_rope_decode, DECODE, head_dim=256, page_size=64, norms=True),
    "rope decode norms": partial(_rope_decode, DECODE, norms=True),
    "rope decode wide norms": partial(_rope_decode, DECODE, head_dim=256, norms=True, weighs=torch.float32),
    "rope decode float32": partial(_rope_decode, DECODE, dtype=torch.float32, norms=True),
    "rope decode fp8": partial(_rope_decode, DECODE, cached=E4M3),
    "rope decode fp8, norms": partial(_rope_decode, DECODE, cached=E4M3, norms=True),
    "extend": partial(_attention, EXTEND),
    "extend head 64": partial(_attention, EXTEND, head_dim=64, page_size=1),
    "extend head 256": partial(_attention, EXTEND, head_dim=256, softcap=50.0),
    "extend window, sinks": partial(_attention, EXTEND, head_dim=64, page_size=64, window=128, sinks=True),
    "extend float32": partial(_attention, EXTEND, dtype=torch.float32),
    "extend head 256, float32": partial(_attention, EXTEND, head_dim=256, dtype=torch.float32),
    "extend fp8": partial(_attention, EXTEND, cached=E4M3),
    "delta rule": partial(_delta_rule, 1),
    "delta rule by channel": partial(_delta_rule, 1, by_channel=True),
    "delta rule of prompts": partial(_delta_rule, 200),
    "delta prompts by channel": partial(_delta_rule, 200, by_channel=True),
    "scan": partial(_scan, 1),
    "scan of prompts": partial(_scan, 200),
    "selective scan": partial(_selective, 200),
    "convolution": partial(_conv, 1),
    "convolution of 3 taps": partial(_conv, 1, bias=True, taps=3),
    "convolution of prompts": partial(_conv, 200, bias=True),
    "rmsnorm": lambda: rmsnorm(_hidden(), _hidden()[0], 1e-5),
    "rmsnorm of heads": lambda: rmsnorm(_hidden(64, 128).view(2, 32, 128), _hidden(1, 128)[0], 1e-5),
    "rmsnorm, wide weight": lambda: rmsnorm(_hidden(), _hidden()[0].float(), 1e-5),
    "add_rmsnorm": lambda: add_rmsnorm(_hidden(), _hidden(), _hidden()[0], 1e-5),
    "latent rope": _latent_rope,
    "latent rope, 128 heads": partial(_latent_rope, 128),
    "latent rope, float32": partial(_latent_rope, dtype=torch.float32),
    "rope_store": partial(_rope, norms=False),
    "rope_store, norms": partial(_rope, norms=True),
    "rope_store, wide norms": partial(_rope, norms=True, weighs=torch.float32),
    "rope_store, fp8": partial(_rope, norms=False, cached=E4M3),
    "silu_and_mul": lambda: silu_and_mul(_hidden(4, 28672)),
    "gelu_and_mul": lambda: gelu_and_mul(_hidden(4, 28672)),
    "gelu_and_mul tanh": lambda: gelu_and_mul(_hidden(4, 28672), "tanh"),
    "linear of one row": lambda: project(_hidden(1), _hidden(), _hidden(1)[0]),
    "linear of one row, onto": lambda: _onto(_hidden(HIDDEN)),
    "linear of a normed row": _normed,
    "linear of an adapted row": _adapted_row,
    "adapted linear, normed row": partial(_adapted_row, norm=True),
    "gated linear, normed row": lambda: _normed("silu"),
    "gelu linear, normed row": lambda: _normed("gelu_tanh"),
    "gelu linear, wide norm": lambda: _normed("gelu_tanh", torch.float32),
    "embedding": partial(_embedding, embedding.TILINGS[0]),
    "largest": partial(_argmax, argmax.TILINGS[0]),
    "largest float32": lambda: argmax.argmax_with_values(_logits(torch.float32)),
    "likeliest": lambda: argmax.greedy(_logits()),
    "logprobs": partial(_logprobs, logprobs.TILINGS[0]),
    "logprobs of rows": partial(_logprobs, logprobs.TILINGS[0], torch.ones(2).long()),
    "candidates": lambda: argmax.best_of_blocks(_logits(), 5),
    "candidates of rows": lambda: argmax.best_of_blocks(_logits(), 5, torch.ones(1).long()),
    "sample": partial(_sample, filtered=False),
    "sample, filters": partial(_sample, filtered=True),
    "sample, filters, float32": partial(_sample, filtered=True, dtype=torch.float32),
    "penalties": _penalties,
    "bitmask": lambda: apply_bitmask_(_logits(), torch.zeros(2, VOCAB // 32, dtype=torch.int32)),
    "bitmask, odd": lambda: apply_bitmask_(_logits()[:, :-1], torch.zeros(2, VOCAB // 32, dtype=torch.int32)),
    "fp8 blocks, one row": partial(_quantized, "fp8", 1, (128, 128)),
    "fp8 rows, one row": partial(_quantized, "fp8", 1, (1, HIDDEN)),
    "int8, one row": partial(_quantized, "int8", 1, (1, HIDDEN)),
    "int8 by 16, one row": partial(_quantized, "int8", 1, (1, 16)),
    "int8 by 16": partial(_quantized, "int8", 4, (1, 16)),
    "int4, one row": partial(_quantized, "int4", 1, (1, 128)),
    "int4, one row, onto": lambda: _onto(_int4()),
    "int4, one row, gated": lambda: project(_hidden(1), _int4(), gate="silu"),
    "fp8 blocks": partial(_quantized, "fp8", 4, (128, 128)),
    "fp8 blocks, 32 rows": partial(_quantized, "fp8", 32, (128, 128)),
    "fp8 blocks, 64 rows": partial(_quantized, "fp8", 64, (128, 128)),
    "fp8 blocks, 128 rows": partial(_quantized, "fp8", 128, (128, 128)),
    "fp8 rows, few outputs": partial(_quantized, "fp8", 32, (1, HIDDEN), n=1024),
    "fp8 rows, many outputs": partial(_quantized, "fp8", 32, (1, HIDDEN), n=28672),
    "fp8 rows, a bias": lambda: project(_hidden(), _weight("fp8", HIDDEN, HIDDEN, (1, HIDDEN)), _hidden(1)[0]),
    "fp8 blocks, many rows": partial(_quantized, "fp8", 200, (128, 128)),
    "fp8 rows, many rows": partial(_quantized, "fp8", 200, (1, HIDDEN)),
    "fp8 blocks, prefill": partial(_quantized, "fp8", 512, (128, 128)),
    "int8": partial(_quantized, "int8", 4, (1, HIDDEN)),
    "int8, prefill": partial(_quantized, "int8", 512, (1, HIDDEN)),
    "int4": partial(_quantized, "int4", 4, (1, 128)),
    "int4, 64 rows": partial(_quantized, "int4", 64, (1, 128)),
    "int4, many rows": partial(_quantized, "int4", 200, (1, 128)),
    "int4, prefill": partial(_quantized, "int4", 512, (1, 128)),
    "round rows": partial(_round, 32),
    "round rows, int8": partial(_round, 32, "int8"),
    "round wide rows": partial(_round, 8192, size=14336),
    "round rows in blocks": partial(_round, 8192, width=128),
    "round normed rows": partial(_round, 32, norm=True),
    "round normed rows, int8": partial(_round, 8192, "int8", norm=True),
    "scale sums": partial(_scale_sums, torch.float32),
    "scale sums, int8, a bias": partial(_scale_sums, torch.int32, bias=True),
    "int4, turned": lambda: turned.turned_linear(_hidden(16), _int4()),
    "int4, turned, 32 rows": lambda: turned.turned_linear(_hidden(32), _weight("int4", 28672, HIDDEN)),
    "int4, turned, 64 rows": lambda: turned.turned_linear(_hidden(64), _int4()),
    "int4, turned, 128 rows": lambda: turned.turned_linear(_hidden(128), _weight("int4", 28672, HIDDEN)),
    "route": lambda: route(_hidden(4, 32), Routing(top_k=4, renormalize=True)),
    "route, softmax of all": lambda: route(_hidden(4, 60), Routing(top_k=4)),
    "route, corrected": lambda: route(
        torch.zeros(4, 384), Routing(top_k=8, score="sigmoid", renormalize=True, scale=2.5), torch.zeros(384)
    ),
    "route, groups": lambda: route(
        torch.zeros(4, 256),
        Routing(top_k=8, score="sigmoid", renormalize=True, groups=8, top_groups=4, group_best=2),
        torch.zeros(256),
    ),
    "route, groups by their best": lambda: route(_hidden(4, 160), Routing(top_k=6, scale=16.0, groups=8, top_groups=3)),
    "moe": partial(_moe, 16),
    "moe, few": partial(_moe, 4),
    "moe, few of many experts": partial(_moe, 1, top_k=8),
    "moe, prefill": partial(_moe, 512),
    "moe, long prefill": partial(_moe, 2048),
    "moe, fp8": partial(_moe, 16, "fp8"),
    "moe, fp8, few": partial(_moe, 1, "fp8", top_k=8),
    "moe, int4, few": partial(_moe, 1, "int4", top_k=8),
    "moe, fp8, 200 tokens": partial(_moe, 200, "fp8"),
    "moe, fp8, prefill": partial(_moe, 512, "fp8"),
    "moe, int4, prefill": partial(_moe, 512, "int4"),
    "moe, mxfp4, few": partial(_mxfp4_moe, 1),
    "moe, mxfp4": partial(_mxfp4_moe, 32),
    "moe, mxfp4, 512 tokens": partial(_mxfp4_moe, 512),
    "moe, mxfp4, prefill": partial(_mxfp4_moe, 2048),
    "moe, mxfp4, float16": partial(_mxfp4_moe, 2048, torch.float16),
    "lora": partial(_lora, 1, 16, QKV),
    "lora, rank 8": partial(_lora, 4, 8, (HIDDEN,)),
    "lora, gate and up": partial(_lora, 4, 64, (14336, 14336)),
    "lora, rank 256": partial(_lora, 256, 256, QKV),
    "lora, float16": partial(_lora, 4, 64, QKV, torch.float16, torch.float16),
    "lora, float32": partial(_lora, 4, 64, QKV, torch.float32, torch.float32),
    "lora, wide inputs": partial(_lora, 4, 64, QKV, torch.float32),
    "lora of prompts": partial(_lora, 4, 64, QKV, longest=64),
    "lora of prompts, rank 8": partial(_lora, 256, 8, (14336, 14336), longest=64),
    "lora of prompts, float16": partial(_lora, 4, 64, QKV, torch.float16, torch.float16, longest=64),
    "lora of prompts, float32": partial(_lora, 4, 64, QKV, torch.float32, torch.float32, longest=64),
    "mxfp4": partial(_quantized, "mxfp4", 4, MXFP4_BLOCK),
    "mxfp4, 64 rows": partial(_quantized, "mxfp4", 64, MXFP4_BLOCK),
    "mxfp4, prefill": partial(_quantized, "mxfp4", 512, MXFP4_BLOCK),
}

TILED: dict[str, tuple[tuple[Tiling, ...], Callable[[Tiling], object]]] = {
    "embedding": (embedding.TILINGS, _embedding),
    "extend": (EXTEND_TILINGS, lambda tiling: _attention(EXTEND, extends=tiling)),
    "rope_store": (rope.TILINGS, lambda tiling: _rope(norms=False, tiling=tiling)),
    "largest": (argmax.TILINGS, _argmax),
    "logprobs": (logprobs.TILINGS, _logprobs),
    "sample": (sampling.TILINGS, lambda tiling: _sample(filtered=False, tiling=tiling)),
    "int4, one row": (
        quantized_gemv.TILINGS,
        lambda tiling: quantized_gemv.gemv(_hidden(1), _int4(), None, tiling=tiling),
    ),
    "moe, mxfp4, few": (moe_gemv_quantized.TILINGS, lambda tiling: _mxfp4_moe(1, tiling=tiling)),
    "int4, tiles": (
        quantized.TILINGS,
        lambda tiling: quantized.tiled_linear(_hidden(), _int4(), None, tiling=tiling),
    ),
    "int4, in full": (dequantize.TILINGS, lambda tiling: dequantize.dequantize(_int4(), BF16, tiling=tiling)),
}
"""Operations with alternative tilings."""
CASES |= {f"{name} {tiling}": partial(run, tiling) for name, (tilings, run) in TILED.items() for tiling in tilings[1:]}
