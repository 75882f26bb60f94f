"""Checks of each Triton operation against its reference on a small case, for `tercet-kernels check`.

The dtype is bfloat16 on a GPU, otherwise float32, because the interpreter computes bfloat16 wrongly.
"""

import itertools
from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend

from tercet.kernels.attention.api import AttentionParams, LatentQueries
from tercet.kernels.attention.latent import absorbed, latent_caches, values_of
from tercet.kernels.attention.prompt_latents import PromptLatent, latent_kernels
from tercet.kernels.attention.prompts import PromptAttention, is_right, missing_cudnn, sdpa
from tercet.kernels.attention.reference import ReferenceAttention, ReferenceLatent
from tercet.kernels.attention.triton import TritonAttention
from tercet.kernels.attention.triton_latent import TritonLatent
from tercet.kernels.ops import (
    activation,
    bitmask,
    logprobs,
    lora,
    moe,
    projection,
    quantized,
    recurrent,
    rmsnorm,
    rounded,
    sampling,
)
from tercet.kernels.ops import penalties as penalties_reference
from tercet.kernels.ops.penalties import Penalties, TokenCounts
from tercet.kernels.ops.philox import NoiseKey
from tercet.kernels.ops.rope import apply_rope, rope_cache
from tercet.kernels.ops.store_kv import store_kv
from tercet.kernels.tools.check import Pair, make_batch
from tercet.kernels.tools.verification import Case
from tercet.kernels.triton import activation as fused_activation
from tercet.kernels.triton import rmsnorm as fused_rmsnorm
from tercet.kernels.triton.attention.latent_rope import latent_rope_store
from tercet.kernels.triton.attention.rope import rope_store
from tercet.kernels.triton.embedding import embedding
from tercet.kernels.triton.launch import cdiv, multiprocessors
from tercet.kernels.triton.linear import choices, eight_bits, turned
from tercet.kernels.triton.linear import lora as fused_lora
from tercet.kernels.triton.linear import projection as fused_projection
from tercet.kernels.triton.linear import quantized as fused_quantized
from tercet.kernels.triton.linear.adapted_row import adapted_row
from tercet.kernels.triton.moe import moe as fused_moe
from tercet.kernels.triton.moe.route import route as fused_route
from tercet.kernels.triton.recurrent import causal_conv as fused_conv
from tercet.kernels.triton.recurrent import delta_rule as fused_delta_rule
from tercet.kernels.triton.recurrent import scan as fused_scan
from tercet.kernels.triton.recurrent import selective as fused_selective
from tercet.kernels.triton.sampling import logprobs as fused_logprobs
from tercet.kernels.triton.sampling import sampling as fused_sampling
from tercet.kernels.triton.sampling.argmax import argmax_with_values, greedy
from tercet.kernels.triton.sampling.bitmask import apply_bitmask_
from tercet.kernels.triton.sampling.penalties import apply_penalties_


def _randn(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device).to(torch.bfloat16 if device.type == "cuda" else torch.float32)


def _attention(device: torch.device) -> Pair:
    """Check decodes in several splits and extends, with heads of 128."""
    batch = make_batch([(1, 40), (1, 300), (1, 1), (20, 20), (33, 130)], 16, device)
    q = _randn(device, sum(batch.host_query_lens), 4, 128)
    k, v = _randn(device, 2, int(batch.page_table.max()) + 1, 16, 1, 128).unbind()
    outputs = []
    for backend in (TritonAttention(), ReferenceAttention()):
        backend.plan(batch)
        outputs.append(backend.attend(q, k, v, AttentionParams(scale=128**-0.5)).to(device))
    return outputs[0], outputs[1]


def _prompts(device: torch.device) -> Pair:
    """Check long prompts beside other rows. Raises RuntimeError if cuDNN is in use here, and refuses or is wrong."""
    rows = [(1, 40), (150, 150), (300, 300), (20, 70)]
    batch, heads, kv_heads, dim = make_batch(rows, 16, device), 4, 2, 128
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    q = torch.randn(sum(batch.host_query_lens), heads, dim, device=device).to(dtype)
    shape = (2, int(batch.page_table.max()) + 1, 16, kv_heads, dim)
    k, v = torch.randn(shape, device=device).to(dtype).unbind()
    kernel = sdpa(SDPBackend.CUDNN_ATTENTION if device.type == "cuda" else SDPBackend.MATH)
    if device.type == "cuda" and not missing_cudnn(device) and not is_right(kernel, q, kv_heads, dim):
        raise RuntimeError("cuDNN computes prompts wrongly, or not at all: the log says how")
    outputs = []
    for backend in (PromptAttention(TritonAttention, kernel, 150), ReferenceAttention()):
        backend.plan(batch)
        outputs.append(backend.attend(q, k, v, AttentionParams(scale=dim**-0.5)).to(device))
    return outputs[0], outputs[1]


def _prompt_latents(device: torch.device) -> Pair:
    """Check long prompts over latents in expanded form, beside other rows. Raises RuntimeError without a kernel."""
    batch, heads, rank, rope, nope, value = (
        make_batch([(1, 40), (150, 150), (20, 70)], 16, device),
        4,
        512,
        64,
        128,
        128,
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    tokens, pages = sum(batch.host_query_lens), int(batch.page_table.max()) + 1
    cache = torch.randn(pages, 16, rank + rope, device=device).to(dtype)
    sizes = ((tokens, heads, nope), (tokens, heads, rope), (heads, nope, rank), (heads, value, rank))
    queries = LatentQueries(*((torch.randn(size, device=device) / 8).to(dtype) for size in sizes))
    kernels = latent_kernels() if device.type == "cuda" else [sdpa(SDPBackend.MATH)]
    backend, reference = PromptLatent(TritonLatent, kernels, 150), ReferenceLatent()
    backend.plan(batch)
    reference.plan(batch)
    params, caches = AttentionParams(scale=(nope + rope) ** -0.5), latent_caches(cache, rank)
    if backend.kernel_for(queries) is None:
        raise RuntimeError("no kernel of torch's computes expanded latents here: the log says why")
    expected = reference.attend(absorbed(queries), *caches, params).to(device)
    return backend.attend_expanded(queries, caches[0], params), values_of(expected, queries.w_uv)


def _many_decodes(device: torch.device) -> Pair:
    """Check two steps with enough rows for a list of splits on any GPU; the second rewrites the list."""
    actual, expected = [], []
    backend, reference, kv_heads = TritonAttention(), ReferenceAttention(), 8
    rows = cdiv(2 * multiprocessors(device), kv_heads)
    for longest in (0, rows - 1):
        batch = make_batch([(1, 2500 if row == longest else 1 + row) for row in range(rows)], 16, device)
        q, pages = _randn(device, rows, kv_heads, 64), int(batch.page_table.max()) + 1
        k, v = _randn(device, 2, pages, 16, kv_heads, 64).unbind()
        backend.plan(batch)
        reference.plan(batch)
        actual.append(backend.attend(q, k, v, AttentionParams(scale=64**-0.5)))
        expected.append(reference.attend(q, k, v, AttentionParams(scale=64**-0.5)).to(device))
    return torch.cat(actual), torch.cat(expected)


def _latent(device: torch.device) -> Pair:
    """Check decodes in several splits and extends, in two blocks of heads, over vectors of DeepSeek's width."""
    batch = make_batch([(1, 40), (1, 600), (1, 1), (3, 3), (5, 70)], 64, device)
    q = _randn(device, sum(batch.host_query_lens), 20, 576)
    cache = _randn(device, int(batch.page_table.max()) + 1, 64, 576)
    outputs = []
    for backend in (TritonLatent(), ReferenceLatent()):
        backend.plan(batch)
        outputs.append(backend.attend(q, *latent_caches(cache, 512), AttentionParams(scale=192**-0.5)).to(device))
    return outputs[0], outputs[1]


def _rmsnorm(device: torch.device) -> Pair:
    x, residual, weight = _randn(device, 5, 4096), _randn(device, 5, 4096), _randn(device, 4096)
    actual, expected = (norm(x, residual, weight, 1e-5) for norm in (fused_rmsnorm.add_rmsnorm, rmsnorm.add_rmsnorm))
    return torch.cat(actual), torch.cat(expected)


def _rope(device: torch.device) -> Pair:
    q, k, v = _randn(device, 6, 8, 64), _randn(device, 6, 2, 64), _randn(device, 6, 2, 64)
    caches, wanted = torch.zeros(2, 4, 2, 4, 2, 64, device=device, dtype=q.dtype).transpose(0, 1)[:2]
    table, positions = rope_cache(64, 64, 1e4).to(device), torch.arange(0, 30, 5, device=device)
    slots = positions % 8
    out = rope_store(q, k, v, positions, table, caches[0], caches[1], slots)
    expected, k = apply_rope(q, k, positions, table)
    store_kv(k, v, wanted[0], wanted[1], slots)
    return torch.cat([out.flatten(), caches.flatten()]), torch.cat([expected.flatten(), wanted.flatten()])


def _latent_rope(device: torch.device) -> Pair:
    """Check DeepSeek's width, with queries of which another kernel wrote a part."""
    q, new, turned = _randn(device, 6, 20, 576), _randn(device, 6, 576), _randn(device, 6, 20, 64)
    cache, norm = _randn(device, 2, 4, 1, 576), projection.Norm(_randn(device, 512), 1e-6)
    table, positions = rope_cache(64, 64, 1e4).to(device), torch.arange(0, 30, 5, device=device)
    slots, wanted, expected = positions % 8, cache.clone(), q.clone()
    latent_rope_store(q, turned, new, norm, positions, table, cache, slots)
    expected[..., 512:], key = apply_rope(turned, new[:, None, 512:], positions, table)
    latents = rmsnorm.rmsnorm(new[:, None, :512], *norm)
    wanted.flatten(0, 1).index_copy_(0, slots, torch.cat([latents, key], 2))
    return torch.cat([q.flatten(), cache.flatten()]), torch.cat([expected.flatten(), wanted.flatten()])


def _rope_decode(device: torch.device) -> Pair:
    """Check decodes in several splits, with norms of heads, that rotate and store their new tokens."""
    case = Case(head_dim=128, page_size=16, heads=(4, 1), window=0, softcap=0.0)
    return case.run_new(TritonAttention(), device, _randn(device, 1).dtype, norms=True)


def _activation(device: torch.device) -> Pair:
    x = _randn(device, 5, 3000)
    return fused_activation.silu_and_mul(x), activation.silu_and_mul(x)


def _projection(device: torch.device) -> Pair:
    """Check one row of unquantized and quantized weights: alone, after a norm and gated, and onto a residual."""
    x, residual, bias = _randn(device, 1, 1536), _randn(device, 1, 70), _randn(device, 70)
    full, norm = torch.randn(70, 1536, device=device) / 40, projection.Norm(_randn(device, 1536), 1e-5)
    weights: list[projection.Weight] = [full.to(x.dtype)]
    kinds: list[quantized.Format] = ["fp8", "int4"]
    weights += [quantized.quantize(full, kind, (1, 128)) for kind in kinds]
    actual, expected = (
        torch.cat(
            [
                part
                for weight in weights
                for part in (
                    op.project(x, weight, bias),
                    op.project_normed(x, None, norm, weight, bias, gate="silu")[0],
                    sum(given for given in op.project_onto(x, residual, weight, bias) if given is not None),
                )
            ],
            1,
        )
        for op in (fused_projection, projection)
    )
    return actual, expected


def _embedding(device: torch.device) -> Pair:
    weight, ids = _randn(device, 50, 300), torch.arange(49, 0, -3, device=device)
    return embedding(ids, weight), weight[ids]


def _argmax(device: torch.device) -> Pair:
    logits = _randn(device, 4, 20_000)
    logits[1, 19_000] = float("inf")
    both = torch.cat([argmax_with_values(logits)[1], greedy(logits)])
    return both, torch.cat([sampling.argmax(logits), sampling.greedy(logits)])


def _logprobs(device: torch.device) -> Pair:
    logits, tokens = _randn(device, 4, 20_000), torch.arange(4, device=device)
    rows = torch.tensor([3, 0, 2], device=device)
    actual, expected = (
        torch.cat([op(logits, tokens, 3)[0], op(logits, tokens[:3], 3, rows)[2].flatten()])
        for op in (fused_logprobs.token_logprobs, logprobs.token_logprobs)
    )
    return actual, expected


def _sampling(device: torch.device) -> Pair:
    logits, one = torch.randn(4, 5000, device=device) * 3, torch.ones(4, device=device)
    noise = NoiseKey(*torch.arange(16, device=device).view(4, 4))
    top_k = torch.tensor([0, 40, 1, 0], device=device)
    filters = sampling.Filters(top_k, one * 0.9, one * 0.01)
    draws = [
        op(logits, one, given, noise) for op in (fused_sampling.sample, sampling.sample) for given in (filters, None)
    ]
    return torch.cat(draws[:2]), torch.cat(draws[2:])


def _penalties(device: torch.device) -> Pair:
    logits, said = torch.randn(2, 3000, device=device), torch.randint(0, 3, (3, 3000), device=device).int()
    counts, one = TokenCounts(said, torch.rand(3, 3000, device=device) < 0.5), torch.ones(2, device=device)
    rows, sequences = torch.tensor([[1, 0], [2, 0]], device=device)
    penalties = Penalties(repetition=one * 1.3, frequency=one * 0.5, presence=one * 0.25)
    mask = bitmask.pack_bitmask(torch.rand(2, 3000, device=device) < 0.5)
    expected = logits.clone()
    penalties_reference.apply_penalties_(expected, rows, counts, sequences, penalties)
    apply_penalties_(logits, rows, counts, sequences, penalties)
    return apply_bitmask_(logits, mask), bitmask.apply_bitmask(expected, mask)


def _moe(device: torch.device) -> Pair:
    """Check a few tokens, some, and so many that experts are dequantized first."""
    x, gate_up, down = _randn(device, 520, 64), _randn(device, 4, 64, 64) / 8, _randn(device, 4, 64, 32) / 6
    logits, biases = torch.randn(520, 4, device=device), moe.ExpertBiases(_randn(device, 4, 64), _randn(device, 4, 64))
    cases: list[tuple[moe.ExpertWeights, moe.ExpertWeights]] = [(gate_up, down)]
    kinds: list[quantized.Format] = ["fp8", "int4", "mxfp4"]
    for kind in kinds:
        few = [quantized.quantize(weight.flatten(0, 1), kind, (1, 32)) for weight in (gate_up, down)]
        cases.append((moe.QuantizedExperts(few[0], 4), moe.QuantizedExperts(few[1], 4)))
    found = []
    for route, op in ((fused_route, fused_moe.fused_moe), (moe.route, moe.fused_moe)):
        routed = [route(logits[:tokens], moe.Routing(top_k=2, renormalize=True)) for tokens in (3, 40, 520)]
        parts = [op(x[: len(w)], w, e, *given, gate="clamped", biases=biases) for w, e in routed for given in cases]
        found.append(torch.cat(parts))
    return found[0], found[1]


def _lora(device: torch.device) -> Pair:
    """Check two adapters, over inputs in splits: segments of no, one, some and many tokens, in tiles of both sizes."""
    some, many = (
        [lora.Segment(1, 0, 1), lora.Segment(0, 1, 17), lora.Segment(1, 17, 17), lora.Segment(1, 20, 27)],
        lora.Segment(0, 30, 90),
    )
    x, parts = _randn(device, 100, 1100), (200, 70, 70)
    weights = lora.LoRAWeights(_randn(device, 2, 3 * 24, 1100) / 33, _randn(device, 2, 24, sum(parts)) / 5, parts)
    actual = _randn(device, 2, 100, sum(parts))
    expected = actual.clone()
    for tile, (runs, longest) in enumerate([(some, 16), ([*some, many], lora.LONGEST_RUN)]):
        rows = lora.LoRARows(runs, torch.tensor(runs, dtype=torch.int32, device=device), [24, 24], longest)
        fused_lora.add_lora(actual[tile], x, weights, rows)
        lora.add_lora(expected[tile], x, weights, rows)
        fused_lora.add_lora(actual[tile], x, weights, rows.sorted_by_slot(len(x)))
        lora.add_lora(expected[tile], x, weights, rows)
    row, wanted = _adapted_row(device)
    return torch.cat([actual.flatten(), row]), torch.cat([expected.flatten(), wanted])


def _adapted_row(device: torch.device) -> Pair:
    """Check one row, with all that is beside its layer."""
    size, parts = 1024, (200, 70, 70)
    weights = lora.LoRAWeights(_randn(device, 2, 3 * 24, size) / 32, _randn(device, 2, 24, sum(parts)) / 5, parts)
    full, x, residual = _randn(device, sum(parts), size) / 32, _randn(device, 1, size), _randn(device, 1, sum(parts))
    norm = projection.Norm(_randn(device, size), 1e-5)
    rows = lora.LoRARows([lora.Segment(1, 0, 1)], torch.tensor([[1, 0, 1]], dtype=torch.int32, device=device), [24, 24])
    found = adapted_row(x, full, None, weights, rows, norm=norm, residual=residual)
    normed = rmsnorm.rmsnorm(x.float(), norm.weight.float(), norm.eps)
    wanted = normed @ full.float().T + residual.float()
    lora.add_lora(wanted, normed, weights, rows)
    return found.flatten(), wanted.flatten().to(found.dtype)


def _quantized(device: torch.device) -> Pair:
    """Check one row, a few and many; with long inputs, few rows are split on any GPU."""
    actual, expected = [], []
    for k in (256, 2304):
        x, full = _randn(device, 300, k), torch.randn(96, k, device=device) * k**-0.5
        cases: list[tuple[quantized.Format, tuple[int, int]]] = [("fp8", (64, 128)), ("int8", (1, k))]
        cases += [("int4", (1, 64)), ("mxfp4", quantized.MXFP4_BLOCK)]
        for (kind, block), rows in itertools.product(cases, (1, 20, 300)):
            weight = quantized.quantize(full, kind, block)
            actual.append(fused_quantized.linear_quantized(x[:rows], weight))
            expected.append(quantized.linear_quantized(x[:rows], weight))
            if rows > 1 and turned.supports_turned(weight):
                actual.append(turned.turned_linear(x[:rows], weight))
                expected.append(expected[-1])
    return torch.cat(actual), torch.cat(expected)


def _rounded(device: torch.device) -> Pair:
    """Check the ways of 8-bit products that the table has for a device, and int8 anywhere, without and with a norm."""
    actual, expected = [], []
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    here = {"int8", *choices.table().get(choices.architecture(device), {})}
    ways = [(kind, way) for kind, every in choices.WAYS.items() if kind in here for way in every if choices.rounds(way)]
    for kind, way in ways:
        block = (choices.BLOCK, choices.BLOCK) if kind == "fp8 block" else (1, 512)
        full = torch.randn(256, 512, device=device) * 512**-0.5
        weight = quantized.quantize(full, "int8" if kind == "int8" else "fp8", block)
        for rows in (20, 300):
            x = torch.randn(rows, 512, device=device).to(dtype)
            rounding = eight_bits.rounding_of(weight, way)
            actual.append(fused_quantized.multiply(x, weight, x[0, :256], way))
            expected.append(rounded.linear_rounded(rounded.round_rows(x, *rounding), weight, x[0, :256], dtype))
    return torch.cat(actual), torch.cat(expected)


def _recurrent(device: torch.device) -> Pair:
    """Check decodes, one with draft tokens, and a prompt of two segments, with their states and snapshots."""
    rest = [recurrent.Segment(2, 3, 0, 4), recurrent.Segment(3, 4, 0), recurrent.Segment(4, 20, 2, 5)]
    singles, tokens = torch.tensor([1, 0]), 90
    segments = recurrent.Segments(singles, [*rest, recurrent.Segment(20, tokens, 2)], [(1, 3)], device=device)
    q, k, v = _randn(device, tokens, 1, 32), _randn(device, tokens, 1, 32), _randn(device, tokens, 2, 16)
    x, weight, decay = _randn(device, tokens, 40), _randn(device, 40, 4), -torch.rand(tokens, 2, device=device)
    delta = recurrent.DeltaInputs(q, k, v, decay, -decay)
    by_channel = delta._replace(decay=-torch.rand(tokens, 2, 32, device=device))
    scan = recurrent.ScanInputs(q, k, v.float(), decay)
    steps, rates = -by_channel.decay[:, 0], -torch.rand(32, 16, device=device)
    selective = recurrent.SelectiveInputs(v[:, 0], v[:, 1], k[:, 0].float(), steps, rates)
    states = torch.randn(6, 2, 32, 16, device=device)
    inputs, found = _randn(device, 6, 40, 3), []
    for ops in (
        (
            fused_delta_rule.gated_delta_rule,
            fused_scan.state_space_scan,
            fused_conv.causal_conv,
            fused_selective.selective_scan,
        ),
        (
            recurrent.gated_delta_rule,
            recurrent.state_space_scan,
            recurrent.causal_conv,
            recurrent.selective_scan,
        ),
    ):
        one, other, scanned, last = states.clone(), states.clone(), states.mT.contiguous(), inputs.clone()
        channels = states[:, 0].clone()
        parts = [
            ops[0](delta, one, segments),
            ops[0](by_channel, other, segments),
            ops[1](scan, scanned, segments),
            ops[2](x, last, weight, None, segments),
            ops[3](selective, channels, segments),
            *(one, other, scanned, last, channels),
        ]
        found.append(torch.cat([part.float().flatten() for part in parts]))
    return found[0], found[1]


CHECKS: dict[str, Callable[[torch.device], Pair]] = {
    "triton attention": _attention,
    "prompts by cuDNN": _prompts,
    "prompts of latents": _prompt_latents,
    "triton many decodes": _many_decodes,
    "triton latent attention": _latent,
    "triton rmsnorm": _rmsnorm,
    "triton rope_store": _rope,
    "triton rope decode": _rope_decode,
    "triton latent rope": _latent_rope,
    "triton activation": _activation,
    "triton projection": _projection,
    "triton embedding": _embedding,
    "triton largest": _argmax,
    "triton logprobs": _logprobs,
    "triton sampling": _sampling,
    "triton penalties, mask": _penalties,
    "triton moe": _moe,
    "triton quantised": _quantized,
    "products in 8 bits": _rounded,
    "triton lora": _lora,
    "triton recurrent": _recurrent,
}
