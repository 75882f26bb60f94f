"""A decoder-only model that computes each step in one native call: see csrc/decoder.h."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tercet.kernels.attention.api import AttentionBatch
from tercet.kernels.attention.cpu import cache_of, rows_of
from tercet.kernels.native import abi
from tercet.kernels.native.linear import PackedLinear, PackedMLP, check_shape
from tercet.kernels.native.lora import Adapters
from tercet.kernels.native.mixture import Mixture
from tercet.kernels.ops.activation import Gate
from tercet.kernels.ops.embedding import ReplacedEmbeddings
from tercet.kernels.ops.lora import LoRARows, LoRAWeights


@dataclass(frozen=True, eq=False, kw_only=True)
class DecoderLayer:
    """Weights of one layer: pre-norm attention, then a gated MLP or a mixture of experts."""

    qkv: PackedLinear
    o: PackedLinear
    mlp: PackedMLP | Mixture
    input_norm: torch.Tensor  # float32 [hidden], like the other norms
    post_norm: torch.Tensor
    q_norm: torch.Tensor | None = None  # [head_dim]
    k_norm: torch.Tensor | None = None
    attention_norm: torch.Tensor | None = None
    """Norm of the output of attention; `mlp_norm` is that of the MLP."""
    mlp_norm: torch.Tensor | None = None
    sinks: torch.Tensor | None = None  # [heads]
    rope: torch.Tensor | None = None
    """Table of angles of this layer, in place of the model's."""
    window: int = 0
    group: int = 0
    """Index of the layer's cache group."""


@dataclass(frozen=True, eq=False, kw_only=True)
class DecoderWeights:
    """Weights of a model, with the sizes and constants that they do not imply."""

    layers: Sequence[DecoderLayer]
    norm: torch.Tensor  # float32 [hidden]
    head: PackedLinear
    embedding: torch.Tensor | None  # float32 or bfloat16 [vocab, hidden]; None means the head's weights (tied)
    rope: torch.Tensor  # float32 [positions, rotary_dim]
    heads: int
    head_dim: int
    eps: float
    gate: Gate = "silu"
    embedding_scale: float = 1.0
    """Factor of token embeddings."""
    attention_scale: float | None = None
    """None means head_dim**-0.5."""
    softcap: float = 0.0
    """Softcap of attention scores; 0 means none."""


class LayerAdapters(NamedTuple):
    """Adapters of one layer; None where a linear layer has none.

    Those of gate_up have two parts. Experts have no adapters.
    """

    qkv: LoRAWeights | None
    o: LoRAWeights | None
    gate_up: LoRAWeights | None
    down: LoRAWeights | None


class NativeDecoder:
    """Decoder that runs steps over KV caches it is given once. Not thread-safe."""

    def __init__(
        self,
        weights: DecoderWeights,
        caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
        adapters: Sequence[LayerAdapters] | None = None,
    ) -> None:
        """Take `caches`, each layer's keys and values [pages, page_size, kv_heads, head_dim].

        `adapters` holds those of each layer, float32 on the CPU. They are read in place and may change between steps.
        Raises ValueError for shapes that do not fit together.
        """
        self._keep = weights, caches  # the structs point into these
        self._functions = weights.head.library.functions
        self._hidden = int(weights.head.struct.k)
        self._groups = max(layer.group for layer in weights.layers) + 1
        self._page_size = caches[0][0].shape[1]
        _check_caches(weights.layers, [keys.shape for keys, _ in caches])
        layers = (abi.Layer * len(caches))()
        for index, (layer, cache) in enumerate(zip(weights.layers, caches, strict=True)):
            layers[index] = _layer(weights, layer, cache)
        self._adapters = Adapters()
        if adapters is not None:
            for struct, layer, own in zip(layers, weights.layers, adapters, strict=True):
                _adapt(struct, self._adapters, layer, own)
        self._layers = layers
        self._model = _model(weights, layers, kv_heads=caches[0][0].shape[2])

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        batches: Sequence[AttentionBatch],
        lora: LoRARows | None = None,
        replaced: ReplacedEmbeddings | None = None,
    ) -> torch.Tensor:
        """Return normalized hidden states float32 [tokens, hidden] of int64 token ids and positions.

        `batches` holds one batch for each cache group, `lora` the tokens that have an adapter, and `replaced` those
        that have other embeddings than the vocabulary's. Raises ValueError, before anything is written, for a token,
        position, page or adapter that does not exist.
        """
        tokens = len(input_ids)
        for tensor in (input_ids, positions):
            if tensor.dtype != torch.int64 or not tensor.is_contiguous() or tensor.shape != (tokens,):
                raise ValueError("token ids and positions are contiguous int64 of one length")
        if len(batches) != self._groups or any(batch.page_size != self._page_size for batch in batches):
            raise ValueError(f"the model has {self._groups} cache groups with pages of {self._page_size} tokens")
        rows = (abi.Rows * len(batches))(*(rows_of(batch) for batch in batches))
        adapted = None if lora is None else self._adapters.rows(lora)
        step = abi.Step(
            *(tokens, len(batches), input_ids.data_ptr(), positions.data_ptr()),
            *(ctypes.cast(rows, ctypes.c_void_p), None if adapted is None else ctypes.addressof(adapted)),
            *((None, None, 0, 0) if replaced is None else self._replaced(replaced)),
        )
        hidden = torch.empty(tokens, self._hidden)
        self._functions.forward(ctypes.byref(self._model), ctypes.byref(step), hidden.data_ptr())
        return hidden

    def _replaced(self, replaced: ReplacedEmbeddings) -> tuple[int, int, int, int]:
        places, vectors = replaced.places, replaced.vectors
        if (
            places.dtype != torch.int64
            or vectors.dtype != torch.float32
            or len(vectors) != len(places)
            or not vectors.shape[1]
            or vectors.shape[1] % self._hidden
        ):
            raise ValueError(f"embeddings are float32 [places, parts * {self._hidden}], and places int64")
        if not (places.is_contiguous() and vectors.is_contiguous()):
            raise ValueError("embeddings and places are contiguous")
        return vectors.data_ptr(), places.data_ptr(), len(places), vectors.shape[1] // self._hidden


def _check_caches(layers: Sequence[DecoderLayer], shapes: Sequence[torch.Size]) -> None:
    """Refuse caches of different shapes in one group: pages and slots are validated against its first layer only."""
    pages: dict[int, int] = {}
    for layer, shape in zip(layers, shapes, strict=True):
        if shape[1:] != shapes[0][1:] or pages.setdefault(layer.group, shape[0]) != shape[0]:
            raise ValueError(f"a layer's cache is {list(shape)} beside one of {list(shapes[0])}")


def _layer(weights: DecoderWeights, layer: DecoderLayer, cache: tuple[torch.Tensor, torch.Tensor]) -> abi.Layer:
    pages = cache_of(*cache, page_size=cache[0].shape[1])
    hidden, queries = weights.head.struct.k, weights.heads * weights.head_dim
    shapes = [(layer.qkv, queries + 2 * pages.kv_heads * pages.head_dim, hidden), (layer.o, hidden, queries)]
    if isinstance(layer.mlp, Mixture):
        shapes.append((layer.mlp.router, layer.mlp.router.outputs, hidden))
        mlp, mixture = (abi.Linear(), abi.Linear()), ctypes.addressof(layer.mlp.struct)
    else:
        inner = layer.mlp.gate_up.outputs // 2
        shapes += [(layer.mlp.gate_up, 2 * inner, hidden), (layer.mlp.down, hidden, inner)]
        mlp, mixture = (layer.mlp.gate_up.struct, layer.mlp.down.struct), None
    for linear, outputs, inputs in shapes:
        check_shape(linear, outputs, inputs)
    if pages.head_dim != weights.head_dim or weights.heads % pages.kv_heads:
        raise ValueError("the cache does not fit the model's heads")
    norms = [layer.input_norm, layer.post_norm, layer.q_norm, layer.k_norm, layer.attention_norm, layer.mlp_norm]
    sizes = [hidden, hidden, weights.head_dim, weights.head_dim, hidden, hidden, weights.heads]
    vectors = zip((*norms, layer.sinks), sizes, strict=True)
    pointers = [_floats(vector, size) if vector is not None else None for vector, size in vectors]
    table = _table(weights, layer)
    return abi.Layer(
        layer.qkv.struct, layer.o.struct, *mlp, mixture, *pointers, table, pages, layer.window, layer.group
    )


def _adapt(struct: abi.Layer, adapters: Adapters, layer: DecoderLayer, own: LayerAdapters) -> None:
    """Point a layer's struct at its adapters."""
    gate_up, down = (None, None) if isinstance(layer.mlp, Mixture) else layer.mlp
    if own.gate_up is not None and own.gate_up.parts != 2 * own.gate_up.parts[:1]:
        raise ValueError(f"adapters of gate and up have parts {own.gate_up.parts}")
    struct.qkv_adapters = adapters.address(own.qkv, layer.qkv)
    struct.o_adapters = adapters.address(own.o, layer.o)
    struct.gate_up_adapters = adapters.address(own.gate_up, gate_up)
    struct.down_adapters = adapters.address(own.down, down)


def _table(weights: DecoderWeights, layer: DecoderLayer) -> int:
    """Return the address of a layer's table of angles."""
    table = weights.rope if layer.rope is None else layer.rope
    if table.shape != weights.rope.shape or table.shape[1] > weights.head_dim:
        raise ValueError("the table of angles does not fit a head")
    if table.dtype != torch.float32 or not table.is_contiguous():
        raise ValueError("the table of angles is contiguous float32")
    return table.data_ptr()


def _model(weights: DecoderWeights, layers: "ctypes.Array[abi.Layer]", *, kv_heads: int) -> abi.Model:
    head, embedding, rope = weights.head.struct, weights.embedding, weights.rope
    if embedding is not None and (embedding.shape != (head.n, head.k) or not embedding.is_contiguous()):
        raise ValueError(f"an embedding {list(embedding.shape)} beside a head {[head.n, head.k]}")
    return abi.Model(
        *(len(layers), head.k, weights.heads, kv_heads, weights.head_dim, head.n),
        *(*rope.shape, _floats(weights.norm, head.k)),
        ctypes.cast(layers, ctypes.c_void_p),
        *((None, 0) if embedding is None else (embedding.data_ptr(), abi.FORMATS[embedding.dtype])),
        *(head, abi.GATES[weights.gate], weights.eps, weights.embedding_scale),
        *(weights.head_dim**-0.5 if weights.attention_scale is None else weights.attention_scale, weights.softcap),
    )


def _floats(x: torch.Tensor, size: int) -> int:
    if x.dtype != torch.float32 or x.shape != (size,) or not x.is_contiguous():
        raise ValueError(f"expected float32 [{size}], not {x.dtype} {list(x.shape)}")
    return x.data_ptr()
