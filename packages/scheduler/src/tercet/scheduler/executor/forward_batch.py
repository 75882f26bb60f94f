"""The batch of one step: flat tokens, their positions, and `attend`, which hides the KV cache."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

import torch

from tercet.kernels.attention.api import (
    AttentionBackend,
    AttentionBatch,
    AttentionParams,
    ExpandingBackend,
    LatentQueries,
    NewTokens,
    RotatingBackend,
)
from tercet.kernels.attention.torch_native import TorchNativeAttention
from tercet.kernels.ops.embedding import ReplacedEmbeddings
from tercet.kernels.ops.lora import LoRARows
from tercet.kernels.ops.recurrent import Segments
from tercet.scheduler.executor.kv_pool import KVPool
from tercet.scheduler.executor.media.audio import StepCross
from tercet.scheduler.executor.state_pool import StatePool
from tercet.scheduler.models.layers.layer_ops import LayerCache


class ForwardMode(Enum):
    """The kinds of rows in a step."""

    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()

    @classmethod
    def of(cls, query_lens: Sequence[int]) -> "ForwardMode":
        """Return DECODE if every row has one token, EXTEND if none has, MIXED otherwise."""
        singles = query_lens.count(1)
        if singles == len(query_lens):
            return cls.DECODE
        return cls.MIXED if singles else cls.EXTEND


@dataclass(frozen=True, eq=False, kw_only=True)
class ForwardBatch:
    """The tokens of all rows, concatenated. A model calls `attend` once per layer."""

    mode: ForwardMode
    input_ids: torch.Tensor  # int64 [tokens]
    positions: torch.Tensor  # int64 [tokens]
    sample_index: torch.Tensor  # int64 [sampling rows]: the last token of each
    attention: Sequence[AttentionBatch]  # one per cache group
    backends: Sequence[AttentionBackend]  # one per cache group, planned for this step
    # the backends that can rotate new tokens; None unless the step is a plain decode
    rotating: Sequence[RotatingBackend | None]
    pool: KVPool
    lora: LoRARows | None = None  # the tokens that have an adapter
    chained: bool = False  # a row may see the new token of another row
    states: StatePool | None = None  # of models with recurrent layers
    segments: Segments | None = None  # with `states`
    replaced: ReplacedEmbeddings | None = None  # of images
    cross: StepCross | None = None  # of models with an encoder and a decoder
    windowed: Sequence[AttentionBackend] = ()  # those of layers with a window, if tokens of images see later ones there

    @classmethod
    def planned(
        cls,
        *,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        sample_index: torch.Tensor,
        attention: Sequence[AttentionBatch],
        backends: Sequence[AttentionBackend],
        pool: KVPool,
        lora: LoRARows | None = None,
        chained: bool = False,
        states: StatePool | None = None,
        segments: Segments | None = None,
        replaced: ReplacedEmbeddings | None = None,
        cross: StepCross | None = None,
    ) -> "ForwardBatch":
        """Create a batch and plan its backends, which stay valid until they are planned for another batch.

        If rows are `chained`, one sees the new token of another, so all are stored before any attends. Backends in
        which no token sees later ones are replaced in a step with images whose tokens do.
        """
        windowed: list[AttentionBackend] = []
        if replaced is not None and replaced.seen is not None:
            seeing = [replace(group, seen=replaced.seen) for group in attention]
            if replaced.in_windows:
                windowed = [TorchNativeAttention() for _ in seeing]
                _plan(windowed, seeing)
            else:
                attention = seeing
                backends = [each if each.bidirectional else TorchNativeAttention() for each in backends]
        _plan(backends, attention)
        mode = ForwardMode.of(attention[0].host_query_lens)
        apart = mode is ForwardMode.DECODE and not chained
        return cls(
            mode=mode,
            input_ids=input_ids,
            positions=positions,
            sample_index=sample_index,
            attention=attention,
            backends=backends,
            rotating=[each if apart and isinstance(each, RotatingBackend) else None for each in backends],
            pool=pool,
            lora=lora,
            chained=chained,
            states=states,
            segments=segments,
            replaced=replaced,
            cross=cross,
            windowed=windowed,
        )

    @property
    def can_be_cut(self) -> bool:
        """Return whether `part` is available: no token sees one after itself, an audio clip or a text."""
        return self.cross is None and (self.replaced is None or self.replaced.seen is None)

    def part(self, tokens: slice) -> "ForwardBatch":
        """Return a batch of some of the step's tokens. A row that is cut continues in the next part.

        The backends are planned for the part and no longer for the whole step.
        """
        return self.planned(
            input_ids=self.input_ids[tokens],
            positions=self.positions[tokens],
            sample_index=self.sample_index,
            attention=[_part(group, tokens) for group in self.attention],
            backends=self.backends,
            pool=self.pool,
            lora=None if self.lora is None else self.lora.part(tokens),
            chained=self.chained,
            states=self.states,
            segments=None if self.segments is None else self.segments.part(tokens),
            replaced=None if self.replaced is None else self.replaced.part(tokens),
        )

    def attend(
        self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Store k and v [tokens, kv_heads, head_dim] in the cache, then attend with q [tokens, heads, head_dim]."""
        group = self.pool.group_of[layer_id]
        self.pool.store(layer_id, k, v, self.attention[group].slot_mapping)
        return self.attend_cached(layer_id, q, params)

    def attend_cross(self, layer_id: int, q: torch.Tensor, params: AttentionParams) -> torch.Tensor:
        """Attend to the audio clips or texts of the tokens. See `CrossBatch`."""
        if self.cross is None:
            raise RuntimeError("this step has no encoded audio or text")
        return self.cross.attend(layer_id, q, params)

    def states_of(self, layer_id: int) -> tuple[tuple[torch.Tensor, ...], Segments]:
        """Return the state tensors of a layer, and the segments of the step's tokens. See `RecurrentBatch`."""
        if self.states is None or self.segments is None:
            raise RuntimeError("this step has no recurrent states")
        return self.states.layer(layer_id), self.segments

    def cache_of(self, layer_id: int) -> LayerCache:
        """Return a layer's cache, for kernels that store new keys and values themselves."""
        slots = self.attention[self.pool.group_of[layer_id]].slot_mapping
        return LayerCache(*self.pool.layer(layer_id), slots, self.pool.scales_of(layer_id))

    def attend_cached(self, layer_id: int, q: torch.Tensor, params: AttentionParams) -> torch.Tensor:
        """Attend with the new tokens' keys and values already in the cache. See `attend`."""
        keys, values = self.pool.layer(layer_id)
        key_scale, value_scale = self.pool.scales_of(layer_id)
        backends = self.windowed if self.windowed and params.window else self.backends
        backend = backends[self.pool.group_of[layer_id]]
        return _scaled(backend.attend(q, keys, values, params, key_scale), value_scale)

    def rotates(self, layer_id: int) -> bool:
        """Return whether `attend_new` is available for a layer."""
        return self.rotating[self.pool.group_of[layer_id]] is not None

    def attend_new(self, layer_id: int, q: torch.Tensor, new: NewTokens, params: AttentionParams) -> torch.Tensor:
        """Attend with unrotated queries and new tokens: the backend normalizes, rotates and stores them.

        Raise RuntimeError if the layer's backend cannot (see `rotates`).
        """
        backend = self.rotating[self.pool.group_of[layer_id]]
        if backend is None:
            raise RuntimeError("no backend here rotates what is new")
        keys, values = self.pool.layer(layer_id)
        return _scaled(backend.attend_new(q, keys, values, new, params), new.scales[1])

    def expands(self, layer_id: int) -> bool:
        """Return whether `attend_expanded` is available for a layer."""
        backend = self.backends[self.pool.group_of[layer_id]]
        return isinstance(backend, ExpandingBackend) and backend.expands

    def attend_expanded(self, layer_id: int, queries: LatentQueries, params: AttentionParams) -> torch.Tensor:
        """Attend with rotated queries of latent attention. Raise RuntimeError if the backend cannot (see `expands`)."""
        backend = self.backends[self.pool.group_of[layer_id]]
        if not isinstance(backend, ExpandingBackend):
            raise RuntimeError("no backend here expands latents")
        return backend.attend_expanded(queries, self.pool.layer(layer_id)[0], params, self.pool.scales_of(layer_id)[0])


def _plan(backends: Sequence[AttentionBackend], attention: Sequence[AttentionBatch]) -> None:
    for backend, group in zip(backends, attention, strict=True):
        backend.plan(group)


def _scaled(out: torch.Tensor, value_scale: float) -> torch.Tensor:
    """Multiply attention's output by the scale of the cached values, in which it is linear."""
    return out if value_scale == 1.0 else out * value_scale


def _part(group: AttentionBatch, tokens: slice) -> AttentionBatch:
    """Return the rows that have some of the tokens, limited to these and the cached tokens before them."""
    rows, query_lens, kv_lens = [], [], []
    end = 0
    for row, (count, length) in enumerate(zip(group.host_query_lens, group.host_kv_lens, strict=True)):
        begin, end = end, end + count
        first, last = max(begin, tokens.start), min(end, tokens.stop)
        if first < last:
            rows.append(row)
            query_lens.append(last - first)
            kv_lens.append(length - (end - last))
    device = group.kv_lens.device
    return replace(
        group,
        query_start=torch.tensor([0, *query_lens]).cumsum(0).int().to(device),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32).to(device),
        page_table=group.page_table[rows[0] : rows[-1] + 1],
        slot_mapping=group.slot_mapping[tokens],
        host_query_lens=query_lens,
        host_kv_lens=kv_lens,
    )
