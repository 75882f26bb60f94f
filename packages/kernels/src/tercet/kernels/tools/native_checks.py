"""Checks of the native linear layers and decoder against plain torch on small cases, for `tercet-kernels check`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch

from tercet.kernels.attention.api import AttentionBatch, AttentionParams
from tercet.kernels.attention.reference import ReferenceAttention
from tercet.kernels.native.library import load_library
from tercet.kernels.native.linear import PackedMLP, Quantization, pack_linear
from tercet.kernels.native.mixture import Mixture
from tercet.kernels.native_decoder import DecoderLayer, DecoderWeights, NativeDecoder
from tercet.kernels.ops.activation import Gate, act_and_mul
from tercet.kernels.ops.linear import linear, linear_int4, linear_int8, quantize_int4, quantize_weight
from tercet.kernels.ops.moe import ExpertBiases, Routing, fused_moe, route
from tercet.kernels.ops.rmsnorm import rmsnorm
from tercet.kernels.ops.rope import apply_rope, rope_cache
from tercet.kernels.ops.store_kv import store_kv
from tercet.kernels.tools.check import Pair, make_batch

_OUTPUTS, _INPUTS, _ROWS = (1, 17, 96, 150), (1, 33, 64, 333), (1, 3, 8, 32, 33)
_HIDDEN, _INNER, _HEADS, _KV_HEADS, _HEAD_DIM, _VOCAB, _EPS, _PAGE_SIZE = 48, 56, 6, 2, 12, 31, 1e-5, 4


def _linears(dtype: torch.dtype, quantization: Quantization = "none") -> Pair:
    """Check all combinations of sizes and numbers of rows."""
    actual, expected = [], []
    for outputs, inputs in product(_OUTPUTS, _INPUTS):
        weight, bias = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype), torch.randn(outputs)
        packed = pack_linear(load_library(), weight, bias, quantization=quantization)
        x = torch.randn(sum(_ROWS), inputs)
        actual += [packed(rows).flatten() for rows in torch.split(x, list(_ROWS))]
        match quantization:
            case "none":
                expected.append(linear(x, weight, bias).flatten())
            case "int8":
                expected.append(linear_int8(x, *quantize_weight(weight), bias).flatten())
            case "int4":
                expected.append(linear_int4(x, *quantize_int4(weight), bias).flatten())
    return torch.cat(actual), torch.cat(expected)


@dataclass(frozen=True, eq=False)
class _Layer:
    """Weights of one layer as plain tensors, and its window."""

    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    norms: tuple[torch.Tensor, ...]  # input, post, queries, keys, and optionally the outputs of both halves
    window: int
    table: torch.Tensor
    sinks: torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """Options of decoders: see `DecoderWeights`. `thetas` are those of the layers' tables."""

    gate: Gate = "silu"
    norms_after: bool = False
    thetas: tuple[float, float] = (1e4, 1e4)
    embedding_scale: float = 1.0
    attention_scale: float = _HEAD_DIM**-0.5
    softcap: float = 0.0
    sinks: bool = False


_GEMMA = _Kind(
    gate="gelu_tanh", norms_after=True, thetas=(1e4, 10.0), embedding_scale=7.0, attention_scale=0.4, softcap=2.0
)


def _decoder(kind: _Kind) -> Pair:
    """Run two layers, the second with a sliding window: three prompts, then a decode of each beside another prompt."""
    layers = [_random_layer(window, theta, kind) for window, theta in zip((0, 5), kind.thetas, strict=True)]
    embedding, norm = torch.randn(_VOCAB, _HIDDEN), torch.randn(_HIDDEN)
    caches = [torch.zeros(2, 12, _PAGE_SIZE, _KV_HEADS, _HEAD_DIM) for _ in layers]
    native = [torch.zeros_like(cache) for cache in caches]
    decoder = _native(layers, embedding, norm, kind, [(cache[0], cache[1]) for cache in native])
    actual, expected = [], []
    for rows in ([(5, 5), (13, 13), (1, 1)], [(1, 6), (1, 14), (1, 2), (17, 17)]):  # rows keep their pages
        batch = make_batch(rows, _PAGE_SIZE, torch.device("cpu"))
        ids = torch.randint(0, _VOCAB, batch.slot_mapping.shape)
        positions = torch.cat([torch.arange(end - new, end) for new, end in rows])
        actual.append(decoder.forward(ids, positions, [batch]))
        hidden = embedding[ids] * kind.embedding_scale
        for layer, cache in zip(layers, caches, strict=True):
            hidden = _run_layer(layer, kind, hidden, positions, cache, batch)
        expected.append(rmsnorm(hidden, norm, _EPS))
    return torch.cat([x.flatten() for x in (*actual, *native)]), torch.cat([x.flatten() for x in (*expected, *caches)])


def _random_layer(window: int, theta: float, kind: _Kind) -> _Layer:
    queries = _HEADS * _HEAD_DIM
    shapes = [(queries + 2 * _KV_HEADS * _HEAD_DIM, _HIDDEN), (_HIDDEN, queries), (2 * _INNER, _HIDDEN)]
    qkv, o, gate_up, down = (torch.randn(shape) / shape[1] ** 0.5 for shape in (*shapes, (_HIDDEN, _INNER)))
    sizes = (_HIDDEN, _HIDDEN, _HEAD_DIM, _HEAD_DIM, *([_HIDDEN] * 2 if kind.norms_after else []))
    norms = tuple(torch.randn(size) for size in sizes)
    sinks = torch.randn(_HEADS) if kind.sinks else None
    return _Layer(qkv, o, gate_up, down, norms, window, rope_cache(32, _HEAD_DIM, theta), sinks)


def _native(
    layers: list[_Layer],
    embedding: torch.Tensor,
    norm: torch.Tensor,
    kind: _Kind,
    caches: list[tuple[torch.Tensor, torch.Tensor]],
) -> NativeDecoder:
    pack = partial(pack_linear, load_library())
    packed = [
        DecoderLayer(
            qkv=pack(layer.qkv),
            o=pack(layer.o),
            mlp=PackedMLP(pack(layer.gate_up, interleave=True), pack(layer.down)),
            input_norm=layer.norms[0],
            post_norm=layer.norms[1],
            q_norm=layer.norms[2],
            k_norm=layer.norms[3],
            attention_norm=layer.norms[4] if kind.norms_after else None,
            mlp_norm=layer.norms[5] if kind.norms_after else None,
            sinks=layer.sinks,
            rope=layer.table if layer is not layers[0] else None,
            window=layer.window,
        )
        for layer in layers
    ]
    weights = DecoderWeights(
        layers=packed,
        norm=norm,
        head=pack(embedding),
        embedding=None,
        rope=layers[0].table,
        heads=_HEADS,
        head_dim=_HEAD_DIM,
        eps=_EPS,
        gate=kind.gate,
        embedding_scale=kind.embedding_scale,
        attention_scale=kind.attention_scale,
        softcap=kind.softcap,
    )
    return NativeDecoder(weights, caches)


def _run_layer(
    layer: _Layer,
    kind: _Kind,
    hidden: torch.Tensor,
    positions: torch.Tensor,
    cache: torch.Tensor,
    batch: AttentionBatch,
) -> torch.Tensor:
    """Compute the output of a layer in plain torch. New keys and values go into the cache."""
    split = [size * _HEAD_DIM for size in (_HEADS, _KV_HEADS, _KV_HEADS)]
    qkv = linear(rmsnorm(hidden, layer.norms[0], _EPS), layer.qkv)
    q, k, v = (part.reshape(len(part), -1, _HEAD_DIM) for part in torch.split(qkv, split, 1))
    q, k = (rmsnorm(x, norm, _EPS) for x, norm in zip((q, k), layer.norms[2:4], strict=True))
    q, k = apply_rope(q, k, positions, layer.table)
    store_kv(k, v, cache[0], cache[1], batch.slot_mapping)
    attention = ReferenceAttention()
    attention.plan(batch)
    scale = kind.attention_scale
    params = AttentionParams(scale=scale, window=layer.window, softcap=kind.softcap, sinks=layer.sinks)
    seen = attention.attend(q, cache[0], cache[1], params)
    hidden = hidden + _normed(linear(seen.float().flatten(1), layer.o), layer.norms[4:5])
    gated = act_and_mul(linear(rmsnorm(hidden, layer.norms[1], _EPS), layer.gate_up), kind.gate)
    return hidden + _normed(linear(gated, layer.down), layer.norms[5:6])


def _mixture(gate: Gate) -> Pair:
    """Check no, few and many tokens, with two of six experts each."""
    routing = Routing(top_k=2, renormalize=True)
    router, biases = torch.randn(6, _HIDDEN), ExpertBiases(torch.randn(6, 2 * _INNER), torch.randn(6, _HIDDEN))
    gate_up, down = (torch.randn(6, n, k) / k**0.5 for n, k in ((2 * _INNER, _HIDDEN), (_HIDDEN, _INNER)))
    pack = partial(pack_linear, load_library())
    gate_ups = map(partial(pack, interleave=True), gate_up, biases.gate_up)
    experts = list(map(PackedMLP, gate_ups, map(pack, down, biases.down)))
    mixture = Mixture(pack(router), experts, routing, gate=gate)
    xs = [torch.randn(tokens, _HIDDEN) for tokens in (0, 1, 5, 300)]
    routed = [route(linear(x, router), routing) for x in xs]
    expected = [fused_moe(x, *to, gate_up, down, gate=gate, biases=biases) for x, to in zip(xs, routed, strict=True)]
    return torch.cat([mixture(x) for x in xs]), torch.cat(expected)


def _normed(x: torch.Tensor, norms: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Apply the norm, if there is one."""
    for norm in norms:
        x = rmsnorm(x, norm, _EPS)
    return x


CHECKS: dict[str, Callable[[], Pair]] = {
    "native linear float32": partial(_linears, torch.float32),
    "native linear bfloat16": partial(_linears, torch.bfloat16),
    "native linear int8": partial(_linears, torch.float32, "int8"),
    "native linear int4": partial(_linears, torch.float32, "int4"),
    "native decoder": partial(_decoder, _Kind()),
    "native decoder of Gemma": partial(_decoder, _GEMMA),
    "native decoder, sinks": partial(_decoder, _Kind(sinks=True)),
    "native experts": partial(_mixture, "silu"),
    "native experts, clamped": partial(_mixture, "clamped"),
}
