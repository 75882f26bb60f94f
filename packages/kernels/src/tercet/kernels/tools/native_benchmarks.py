"""Benchmarks of the native linear layers and the native decoder on a CPU, for `tercet-kernels bench`.

Each call is reported twice: by the bytes of weights, keys and values that it reads, and by its arithmetic.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle

import torch

from tercet.kernels.native.library import load_library
from tercet.kernels.native.linear import PackedLinear, PackedMLP, Quantization, pack_linear
from tercet.kernels.native_decoder import DecoderLayer, DecoderWeights, NativeDecoder
from tercet.kernels.ops.rope import rope_cache
from tercet.kernels.tools.bench import HEAD_DIM, PAGE_SIZE, Figure, measure
from tercet.kernels.tools.check import make_batch

_FORMATS: dict[str, Quantization] = {"bfloat16": "none", "int8": "int8", "int4": "int4"}
_CPU = torch.device("cpu")
_CONTEXT = 256


def native_figures(
    *,
    width: int = 4096,
    rotated: int = 1 << 26,
    hidden: int = 2048,
    batches: tuple[int, ...] = (1, 8, 32, 128),
) -> Iterator[Figure]:
    """Measure square layers of `width`; `rotated` bytes of them take turns, so that weights come from memory.

    The decoder has two layers of `hidden`, and rows of 256 tokens.
    """
    weight = torch.randn(width, width).bfloat16()
    for name, quantization in _FORMATS.items():
        packed = [pack_linear(load_library(), weight, quantization=quantization)]
        while sum(linear.bytes for linear in packed) < rotated:
            packed.append(pack_linear(load_library(), weight, quantization=quantization))
        for rows in batches:
            run = partial(_multiply, cycle(packed), torch.randn(rows, width))
            yield from _figures(f"{name} linear, {_rows(rows)}", run, packed[0].bytes, 2.0 * rows * width**2)
    for name, quantization in _FORMATS.items():
        yield from _decoder(name, quantization, hidden, batches)


def _multiply(packed: "cycle[PackedLinear]", x: torch.Tensor) -> torch.Tensor:
    return next(packed)(x)


def _decoder(name: str, quantization: Quantization, hidden: int, batches: tuple[int, ...]) -> Iterator[Figure]:
    """Measure a decoder with the proportions of Llama: heads of 128, 4 queries a KV head, an MLP 3.5 times as wide."""
    heads, inner, most = hidden // HEAD_DIM, 7 * hidden // 2, max(batches)
    kv_heads = max(1, heads // 4)

    def pack(outputs: int, inputs: int, *, interleave: bool = False) -> PackedLinear:
        weight = torch.randn(outputs, inputs).bfloat16()
        return pack_linear(load_library(), weight, quantization=quantization, interleave=interleave)

    mlps = [PackedMLP(pack(2 * inner, hidden, interleave=True), pack(hidden, inner)) for _ in range(2)]
    layers = [
        DecoderLayer(
            qkv=pack((heads + 2 * kv_heads) * HEAD_DIM, hidden),
            o=pack(hidden, heads * HEAD_DIM),
            mlp=mlp,
            input_norm=torch.ones(hidden),
            post_norm=torch.ones(hidden),
        )
        for mlp in mlps
    ]
    weights = DecoderWeights(
        layers=layers,
        norm=torch.ones(hidden),
        head=pack(PAGE_SIZE, hidden),  # not part of a step
        embedding=None,
        rope=rope_cache(_CONTEXT, HEAD_DIM, 1e4),
        heads=heads,
        head_dim=HEAD_DIM,
        eps=1e-5,
    )
    shape = (2, most * _CONTEXT // PAGE_SIZE, PAGE_SIZE, kv_heads, HEAD_DIM)
    caches = [torch.randn(shape).bfloat16() for _ in layers]
    decoder = NativeDecoder(weights, [(cache[0], cache[1]) for cache in caches])
    linears = [linear for layer, mlp in zip(layers, mlps, strict=True) for linear in (layer.qkv, layer.o, *mlp)]
    parameters = sum(linear.outputs * int(linear.struct.k) for linear in linears)
    for rows in batches:
        batch = make_batch([(1, _CONTEXT)] * rows, PAGE_SIZE, _CPU)
        ids, positions = torch.arange(rows) % PAGE_SIZE, torch.full((rows,), _CONTEXT - 1)
        run = partial(decoder.forward, ids, positions, [batch])
        read = sum(linear.bytes for linear in linears) + sum(cache.nbytes for cache in caches) * rows // most
        arithmetic = 2.0 * rows * (parameters + 2 * len(layers) * _CONTEXT * heads * HEAD_DIM)
        yield from _figures(f"{name} decoder, {_rows(rows)}", run, read, arithmetic)


def _figures(name: str, run: Callable[[], object], read: int, arithmetic: float) -> Iterator[Figure]:
    seconds = measure(run, _CPU)
    yield Figure(name, seconds, float(read), "GB/s")
    yield Figure(name, seconds, arithmetic, "GFLOP/s")


def _rows(count: int) -> str:
    return f"{count} row{'s' * (count > 1)}"
