"""A decoder on native kernels: the same model with packed weights, which computes a step in one call."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, overload

import torch
from torch import nn

from tercet.kernels.attention.api import AttentionBatch
from tercet.kernels.memory import give_back
from tercet.kernels.native.blocks import Activations, pack_blocks
from tercet.kernels.native.library import Library
from tercet.kernels.native.linear import PackedLinear, PackedMLP, Quantization, pack_linear
from tercet.kernels.native.mixture import Mixture
from tercet.kernels.native_decoder import DecoderLayer, DecoderWeights, NativeDecoder
from tercet.kernels.ops.embedding import ReplacedEmbeddings
from tercet.kernels.ops.lora import LoRARows
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.layers import decoder
from tercet.scheduler.models.layers.layers import Attention, GatedMLP, SquaredReLUMLP
from tercet.scheduler.models.layers.linear import Linear
from tercet.scheduler.models.layers.lora import LoRABank
from tercet.scheduler.models.layers.moe import MixtureOfExperts
from tercet.scheduler.models.layers.norms import RMSNorm
from tercet.scheduler.models.layers.shard import WHOLE, Shard
from tercet.scheduler.models.native_linear import pack_experts, unsupported_dtype
from tercet.scheduler.models.registry import family_of


def unsupported_natively(config: ModelConfig, cached: torch.dtype, shard: Shard = WHOLE) -> str:
    """Return the reason why native kernels cannot run a model with a KV cache of dtype `cached`; empty if they can."""
    if not shard.is_whole:
        return "native kernels run no part of a model"
    if config.latent is not None:
        return "native kernels run no layers with latent attention"
    if config.recurrent is not None:
        return "native kernels run no recurrent layers"
    scalings = [rope.query_scaling for rope in (config.rope, config.local_rope) if rope is not None]
    if any(each is not None and each.factors(config.context_length) is not None for each in scalings):
        return "native kernels scale no queries by their positions"
    if config.shared_caches or len({*map(config.heads_of, range(config.layers))}) > 1:
        return "native kernels run layers of one shape"
    if reason := family_of(config.architecture).not_native:
        return reason
    if config.moe is not None and config.quantization is not None and config.quantization.method == "mxfp4":
        return "native kernels run no experts in few bits"
    return unsupported_dtype(config.dtype, "weights") or unsupported_dtype(cached, "keys and values")


class Pool(Protocol):
    """The memory of keys and values. See `KVPool`."""

    group_of: dict[int, int]

    def layer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's key and value caches."""
        ...


class Batch(Protocol):
    """The part of a step that a native model reads. See `ForwardBatch`."""

    @property
    def attention(self) -> Sequence[AttentionBatch]:
        """The attention batch of each cache group."""
        ...

    @property
    def pool(self) -> Pool:
        """The KV pool, the same for every step."""
        ...

    @property
    def lora(self) -> LoRARows | None:
        """The tokens that have an adapter."""
        ...

    @property
    def replaced(self) -> ReplacedEmbeddings | None:
        """The tokens that have other embeddings than the vocabulary's."""
        ...


class NativeCausalLM:
    """A model on native kernels. It takes the weights out of a loaded model layer by layer, so that memory never holds
    all twice.

    Weights that are still in their mapped files are read here, once. Activations between layers are float32 for every
    dtype of the model. Inputs of weights that stay in few bits are rounded to int8, unless the dtype is float32 or the
    build is the portable one, in which int8 products are slower.
    """

    def __init__(
        self,
        model: decoder.CausalLM,
        library: Library,
        *,
        quantization: Quantization = "none",
        adapters: LoRABank | None = None,
    ) -> None:
        self._model = model
        self._adapters = adapters
        self._library = library
        self._quantization = quantization
        exact = model.config.dtype == torch.float32 or library.level == "portable"
        self._activations: Activations = "float32" if exact else "int8"
        self._layers = [self._pack_layer(layer) for layer in model.model.layers]
        self._norm = _norm(model.model.norm)
        self.head, self._embedding = self._pack_head(model)
        give_back()  # return the memory of the loaded weights
        self._decoder: NativeDecoder | None = None
        self._pool: Pool | None = None

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the hidden states, float32 [tokens, hidden], of input ids [tokens] at positions [tokens]."""
        if self._decoder is None or self._pool is not batch.pool:
            self._decoder, self._pool = self._bind(batch.pool), batch.pool
        replaced = batch.replaced
        if replaced is not None:
            replaced = replaced._replace(vectors=replaced.vectors.float())
        return self._decoder.forward(input_ids, positions, batch.attention, batch.lora, replaced)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits, float32 [rows, vocab], of hidden states [rows, hidden]."""
        return decoder.scale_logits(self.head(hidden), self._model.config)

    def _bind(self, pool: Pool) -> NativeDecoder:
        config, body = self._model.config, self._model.model
        attention = _parts(body.layers[0])[1]
        gates = [mlp.gate for _, _, mlp in map(_parts, body.layers) if isinstance(mlp, GatedMLP)]
        layers = [replace(layer, group=pool.group_of[index]) for index, layer in enumerate(self._layers)]
        weights = DecoderWeights(
            layers=layers,
            norm=self._norm,
            head=self.head,
            embedding=self._embedding,
            rope=attention.rotary.cache,
            heads=config.heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            gate=gates[0] if gates else "silu",  # mixtures have their own
            embedding_scale=body.embed_tokens.scale,
            attention_scale=attention.params.scale,
            softcap=attention.params.softcap,
        )
        numbers = range(len(layers))
        adapters = None if self._adapters is None else list(map(self._adapters.of_layer, numbers))
        return NativeDecoder(weights, list(map(pool.layer, numbers)), adapters)

    def _pack_head(self, model: decoder.CausalLM) -> tuple[PackedLinear, torch.Tensor | None]:
        """Return the packed head, and the embedding unless the head has its values.

        A head in blocks stays in few bits, also as the embedding, if its inputs are rounded.
        """
        embedding, tied = model.model.embed_tokens, model.lm_head is None
        source = embedding if model.lm_head is None else model.lm_head
        if self._quantization == "none" and self._activations == "int8":
            blocks = source.take_blocks()
            if blocks is not None:
                return pack_blocks(self._library, blocks), None if tied else torch.cat(embedding.take())
        rows = source.take()
        head = pack_linear(self._library, rows, quantization=self._quantization)
        if tied:  # an unquantized head keeps the embedding's exact values
            return head, None if self._quantization == "none" else torch.cat(rows)
        return head, torch.cat(embedding.take())

    def _pack_layer(self, layer: nn.Module) -> DecoderLayer:
        norms, attention, mlp = _parts(layer)
        if norms.attention is None or norms.mlp is None:
            raise TypeError("native kernels normalize the inputs of attention and MLP")
        return DecoderLayer(
            qkv=self._pack(attention.qkv_proj),
            o=self._pack(attention.o_proj),
            mlp=self._pack_mixture(mlp) if isinstance(mlp, MixtureOfExperts) else self._pack_mlp(mlp),
            input_norm=_norm(norms.attention),
            post_norm=_norm(norms.mlp),
            q_norm=_norm(attention.q_norm),
            k_norm=_norm(attention.k_norm),
            attention_norm=_norm(norms.after_attention),
            mlp_norm=_norm(norms.after_mlp),
            sinks=None if attention.sinks is None else attention.sinks.data.float(),
            rope=attention.rotary.cache,
            window=attention.params.window,
        )

    def _pack_mlp(self, mlp: GatedMLP | SquaredReLUMLP) -> PackedMLP:
        if isinstance(mlp, SquaredReLUMLP):
            raise TypeError("native kernels support no MLP without a gate")
        return PackedMLP(self._pack(mlp.gate_up_proj, interleave=True), self._pack(mlp.down_proj))

    def _pack_mixture(self, mlp: MixtureOfExperts) -> Mixture:
        """Pack a mixture of experts. Routers are never quantized, because this would change the choice of experts."""
        if mlp.expert_gate is None:
            raise TypeError("native mixtures have experts with a gate")
        gate_ups = pack_experts(self._library, mlp.experts.gate_up_proj, self._quantization, interleave=True)
        downs = pack_experts(self._library, mlp.experts.down_proj, self._quantization)
        shared: tuple[PackedLinear | None, PackedMLP] | None = None
        if mlp.shared_experts is not None:
            shared = None, self._pack_mlp(mlp.shared_experts)
        if mlp.shared_expert is not None and mlp.shared_expert_gate is not None:
            shared = self._pack(mlp.shared_expert_gate, rounded=False), self._pack_mlp(mlp.shared_expert)
        return Mixture(
            self._pack(mlp.gate, rounded=False),
            list(map(PackedMLP, gate_ups, downs)),
            mlp.routing,
            correction=mlp.gate.e_score_correction_bias,
            gate=mlp.expert_gate,
            shared=shared,
        )

    def _pack(self, linear: Linear, *, interleave: bool = False, rounded: bool = True) -> PackedLinear:
        """Pack a module's weights and remove them from the module."""
        bias = None if linear.bias is None else linear.bias.data
        quantization = self._quantization if rounded else "none"
        blocks = linear.take_blocks() if quantization == "none" and linear.order is None else None
        if blocks is not None:
            return pack_blocks(self._library, blocks, bias, activations=self._activations, interleave=interleave)
        return pack_linear(self._library, linear.take(), bias, quantization=quantization, interleave=interleave)


def _parts(layer: nn.Module) -> tuple[decoder.Norms, Attention, GatedMLP | MixtureOfExperts]:
    """Return the parts of a layer that native kernels support. Raise TypeError for others."""
    if not isinstance(layer, decoder.DecoderLayer):
        raise TypeError(f"{type(layer).__name__} is not a layer that native kernels know")
    if not isinstance(layer.mlp, GatedMLP | MixtureOfExperts):
        raise TypeError(f"{type(layer.mlp).__name__} is not an MLP that native kernels know")
    if not isinstance(layer.self_attn, Attention):
        raise TypeError(f"{type(layer.self_attn).__name__} is no attention that native kernels know")
    return layer.norms, layer.self_attn, layer.mlp


@overload
def _norm(module: RMSNorm) -> torch.Tensor: ...
@overload
def _norm(module: RMSNorm | None) -> torch.Tensor | None: ...
def _norm(module: RMSNorm | None) -> torch.Tensor | None:
    return None if module is None else module.weight.data.float()
