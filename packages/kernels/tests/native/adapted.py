"""A small decoder with adapters: native, with one of them merged into its weights, and in plain torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from tercet.kernels.attention.api import AttentionParams
from tercet.kernels.attention.reference import ReferenceAttention
from tercet.kernels.native.library import Library
from tercet.kernels.native.linear import PackedMLP, Quantization, pack_linear, pack_linears
from tercet.kernels.native.mixture import Mixture
from tercet.kernels.native_decoder import DecoderLayer, DecoderWeights, LayerAdapters, NativeDecoder
from tercet.kernels.ops.activation import Gate, act_and_mul
from tercet.kernels.ops.linear import linear_int4, linear_int8, quantize_int4, quantize_weight
from tercet.kernels.ops.lora import LoRARows, LoRAWeights, Segment, add_lora
from tercet.kernels.ops.moe import Routing
from tercet.kernels.ops.rmsnorm import rmsnorm
from tercet.kernels.ops.rope import apply_rope, rope_cache
from tercet.kernels.ops.store_kv import store_kv
from tercet.kernels.tools.check import make_batch

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB, EPS, PAGE_SIZE = 48, 56, 6, 2, 12, 31, 1e-5, 4
RANK = 64
PARTS = {
    "qkv": (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM),
    "o": (HIDDEN,),
    "gate_up": (INNER, INNER),
    "down": (HIDDEN,),
}
INPUTS = {"qkv": HIDDEN, "o": HEADS * HEAD_DIM, "gate_up": HIDDEN, "down": INNER}
ALL = tuple(PARTS)
RANKS = [5, RANK, 1, 0, 16]
NONE = -1
"""In place of a place."""

Rows = list[tuple[int, int]]
"""See `make_batch`."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What layers differ in."""

    dtype: torch.dtype = torch.float32
    quantization: Quantization = "none"
    norms_after: bool = False
    gate: Gate = "silu"
    experts: int = 0
    layers: int = 2


@dataclass(frozen=True, eq=False)
class Model:
    """Weights as plain tensors, by layer and name."""

    kind: Kind
    weights: list[dict[str, torch.Tensor]]
    norms: list[dict[str, Any]]
    embedding: torch.Tensor = field(default_factory=lambda: torch.randn(VOCAB, HIDDEN))
    norm: torch.Tensor = field(default_factory=lambda: torch.randn(HIDDEN))
    bias: torch.Tensor = field(default_factory=lambda: torch.randn(sum(PARTS["qkv"])))
    """Of qkv, in every layer."""

    @classmethod
    def random(cls, **kind: Any) -> "Model":
        own = Kind(**kind)
        shapes = {name: (sum(PARTS[name]), INPUTS[name]) for name in ALL}
        weights = [
            {name: (torch.randn(shape) / shape[1] ** 0.5).to(own.dtype) for name, shape in shapes.items()}
            for _ in range(own.layers)
        ]
        names = ["input_norm", "post_norm", *(["attention_norm", "mlp_norm"] if own.norms_after else [])]
        sizes = {**dict.fromkeys(names, HIDDEN), "q_norm": HEAD_DIM, "k_norm": HEAD_DIM}
        norms = [{name: torch.randn(size) for name, size in sizes.items()} for _ in range(own.layers)]
        return cls(own, weights, norms)

    def merged(self, adapters: list[LayerAdapters], place: int) -> "Model":
        """With one adapter in the weights."""
        merged = [dict(layer) for layer in self.weights]
        for layer, own in zip(merged, adapters, strict=True):
            for name, weights in own._asdict().items():
                if weights is not None:
                    layer[name] = (layer[name].double() + product(weights, place)).float()
        return replace(self, weights=merged)

    def native(self, library: Library, adapters: list[LayerAdapters] | None = None) -> "Native":
        pack = partial(pack_linear, library, quantization=self.kind.quantization)
        layers = []
        for weights, norms in zip(self.weights, self.norms, strict=True):
            mlp = PackedMLP(pack(weights["gate_up"], interleave=True), pack(weights["down"]))
            own = self._mixture(library, weights) if self.kind.experts else mlp
            layers.append(DecoderLayer(qkv=pack(weights["qkv"], self.bias), o=pack(weights["o"]), mlp=own, **norms))
        decoder = DecoderWeights(
            layers=layers,
            norm=self.norm,
            head=pack_linear(library, self.embedding),
            embedding=None,
            rope=rope_cache(64, HEAD_DIM, 1e4),
            heads=HEADS,
            head_dim=HEAD_DIM,
            eps=EPS,
            gate=self.kind.gate,
        )
        return Native(decoder, adapters)

    def _mixture(self, library: Library, weights: dict[str, torch.Tensor]) -> Mixture:
        """Experts that are alike but for their size."""
        count = self.kind.experts
        router = pack_linear(library, torch.linspace(-1, 1, count * HIDDEN).view(count, HIDDEN))
        scales = torch.arange(1, count + 1)[:, None, None]
        pack = partial(pack_linears, library, biases=[None] * count)
        gate_ups = pack(weights["gate_up"] * scales, interleave=True)
        return Mixture(
            router, list(map(PackedMLP, gate_ups, pack(weights["down"] / scales))), Routing(top_k=2, renormalize=True)
        )


class Native:
    """A decoder with caches of its own."""

    def __init__(self, weights: DecoderWeights, adapters: list[LayerAdapters] | None) -> None:
        self.caches = torch.zeros(len(weights.layers), 2, 80, PAGE_SIZE, KV_HEADS, HEAD_DIM)
        self.decoder = NativeDecoder(weights, [(cache[0], cache[1]) for cache in self.caches], adapters)

    def __call__(self, ids: torch.Tensor, rows: Rows, lora: LoRARows | None = None) -> torch.Tensor:
        positions = torch.cat([torch.arange(end - new, end) for new, end in rows])
        return self.decoder.forward(ids, positions, [make_batch(rows, PAGE_SIZE, torch.device("cpu"))], lora)


def random_weights(name: str, ranks: Sequence[int] = RANKS) -> LoRAWeights:
    """Adapters that change a product by about as much as it is. Beyond an adapter's rank nothing is to be read."""
    parts, inputs = PARTS[name], INPUTS[name]
    a = torch.randn(len(ranks), len(parts), RANK, inputs) / inputs**0.5
    b = torch.randn(len(ranks), RANK, sum(parts))
    for place, rank in enumerate(ranks):
        b[place] /= max(rank, 1) ** 0.5
        a[place, :, rank:] = b[place, rank:] = torch.nan
    return LoRAWeights(a.flatten(1, 2), b, parts)


def random_adapters(names: Sequence[str] = ALL, layers: int = 2, ranks: Sequence[int] = RANKS) -> list[LayerAdapters]:
    return [
        LayerAdapters(*(random_weights(name, ranks) if name in names else None for name in ALL)) for _ in range(layers)
    ]


def product(weights: LoRAWeights, place: int) -> torch.Tensor:
    """What an adapter adds to the weight [outputs, inputs], float64."""
    a, b = weights.a[place].double().view(len(weights.parts), RANK, -1), weights.b[place].double().nan_to_num()
    parts = zip(a.nan_to_num(), torch.split(b, list(weights.parts), 1), strict=True)
    return torch.cat([columns.T @ rows for rows, columns in parts])


def lora_rows(rows: Rows, places: Sequence[int], ranks: Sequence[int] = RANKS) -> LoRARows:
    """One place for each row of a step, in runs of up to 16 tokens."""
    runs, start = [], 0
    for (new, _), place in zip(rows, places, strict=True):
        if place != NONE:
            runs += [Segment(place, first, min(first + 16, start + new)) for first in range(start, start + new, 16)]
        start += new
    return table_of(runs, ranks)


def table_of(runs: list[Segment], ranks: Sequence[int] = RANKS) -> LoRARows:
    return LoRARows(runs, torch.tensor(runs, dtype=torch.int32).view(-1, 3), ranks)


def random_ids(rows: Rows) -> torch.Tensor:
    return torch.randint(0, VOCAB, (sum(new for new, _ in rows),))


def by_row(x: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, ...]:
    return torch.split(x, [new for new, _ in rows])


def error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return float((actual - exact).abs().max() / exact.abs().max())


def rounded_linear(kind: Kind, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A linear layer whose weights and inputs are rounded, in plain torch."""
    match kind.quantization:
        case "none":
            return x.to(kind.dtype).float() @ weight.float().T
        case "int8":
            return linear_int8(x, *quantize_weight(weight))
        case "int4":
            return linear_int4(x, *quantize_int4(weight))


def run_plain(model: Model, adapters: list[LayerAdapters], ids: torch.Tensor, rows: Rows, lora: LoRARows) -> Any:
    """Of prompts, in plain torch."""
    hidden = model.embedding[ids]
    batch = make_batch(rows, PAGE_SIZE, torch.device("cpu"))
    positions, attention = torch.cat([torch.arange(end) for _, end in rows]), ReferenceAttention()
    attention.plan(batch)
    for weights, norms, own in zip(model.weights, model.norms, adapters, strict=True):
        multiply = partial(_multiply_adapted, model.kind, weights, own, lora)
        qkv = multiply("qkv", rmsnorm(hidden, norms["input_norm"], EPS)) + model.bias
        parts = torch.split(qkv, list(PARTS["qkv"]), 1)
        q, k, v = (part.reshape(len(ids), -1, HEAD_DIM) for part in parts)
        q, k = rmsnorm(q, norms["q_norm"], EPS), rmsnorm(k, norms["k_norm"], EPS)
        q, k = apply_rope(q, k, positions, rope_cache(64, HEAD_DIM, 1e4))
        cache = torch.zeros(2, 80, PAGE_SIZE, KV_HEADS, HEAD_DIM)
        store_kv(k, v, cache[0], cache[1], batch.slot_mapping)
        seen = attention.attend(q, cache[0], cache[1], AttentionParams(scale=HEAD_DIM**-0.5))
        hidden = hidden + multiply("o", seen.flatten(1))
        gated = act_and_mul(multiply("gate_up", rmsnorm(hidden, norms["post_norm"], EPS)), model.kind.gate)
        hidden = hidden + multiply("down", gated)
    return rmsnorm(hidden, model.norm, EPS)


def _multiply_adapted(
    kind: Kind, weights: dict[str, torch.Tensor], own: LayerAdapters, lora: LoRARows, name: str, x: torch.Tensor
) -> torch.Tensor:
    out, adapters = rounded_linear(kind, x, weights[name]), own._asdict()[name]
    if adapters is not None:
        add_lora(out, x, adapters, lora)
    return out
