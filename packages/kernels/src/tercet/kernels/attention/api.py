"""Interface of attention backends."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol, runtime_checkable

import torch


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionBatch:
    """Rows of one step in one cache group: the new tokens of each row, and the place of its keys and values.

    Row i owns tokens `query_start[i]:query_start[i + 1]` of the step. They are the last `host_query_lens[i]` of the
    row's `host_kv_lens[i]` tokens, and each attends to itself and to all earlier tokens. Rows of one new token come
    first. Entries of `page_table` past a row's last page are never read.
    """

    query_start: torch.Tensor  # int32 [rows + 1]
    kv_lens: torch.Tensor  # int32 [rows], after this step
    page_table: torch.Tensor  # int32 [rows, max_pages]
    slot_mapping: torch.Tensor  # int64 [tokens]: page * page_size + offset of every new token
    page_size: int
    host_query_lens: list[int]
    host_kv_lens: list[int]
    seen: torch.Tensor | None = None
    """int32 [tokens]: number of tokens of its row that each new token sees, where some see tokens after themselves. It
    does not decrease within a row. A window still ends at the token itself."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.host_kv_lens)

    @cached_property
    def max_query(self) -> int:
        """Largest number of new tokens of a row."""
        return max(self.host_query_lens)

    @cached_property
    def max_kv(self) -> int:
        """Tokens of the longest row after this step."""
        return max(self.host_kv_lens)

    @cached_property
    def decodes(self) -> int:
        """Number of leading rows that have exactly one new token; later rows with one are treated as extends."""
        return next((row for row, length in enumerate(self.host_query_lens) if length != 1), self.rows)


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionParams:
    """Parameters of attention in one layer, made once, when the layer is built.

    A token sees all tokens up to itself, or with `window` > 0 itself and the `window - 1` tokens before it.
    `softcap` > 0 turns a score s into softcap * tanh(s / softcap). `sinks` adds a score without a value to each head's
    softmax. `chunk` > 0 is for `ChunkedAttention` alone.
    """

    scale: float
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None  # [heads]


class AttentionBackend(Protocol):
    """Implementation of attention. An instance belongs to one cache group and holds the plan of one step."""

    @property
    def capturable(self) -> bool:
        """True if a decode may be captured in a CUDA graph.

        A captured decode reads its tensors and what `plan` derived from its host lists, so `plan` is called for each
        replayed step, with as many decodes as were captured.
        """
        ...

    @property
    def bidirectional(self) -> bool:
        """True if `AttentionBatch.seen` is supported."""
        ...

    def plan(self, batch: AttentionBatch) -> None:
        """Prepare a step; called once, before `attend` of the first layer."""
        ...

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        params: AttentionParams,
        key_scale: float = 1.0,
    ) -> torch.Tensor:
        """Return the attention of q [tokens, heads, head_dim] over caches [pages, page_size, kv_heads, head_dim].

        The caches already contain the keys and values of the new tokens. Their dtype may differ from that of q and may
        be float8_e4m3fn; cached keys are multiplied by `key_scale`, values are not scaled. The result is [tokens,
        heads, head_dim] in q's dtype. Plain torch also takes values of another size, which is then that of the result.
        """
        ...


@dataclass(frozen=True, eq=False, kw_only=True)
class NewTokens:
    """Projected inputs of the new tokens of a step in one layer, before rotation and caching."""

    k: torch.Tensor  # [tokens, kv_heads, head_dim], possibly a view of one projection, like v
    v: torch.Tensor
    positions: torch.Tensor  # int64 [tokens]
    table: torch.Tensor  # from `rope_cache`, as wide as a head
    norms: tuple[torch.Tensor, torch.Tensor] | None  # weights [head_dim] of the norms of queries and keys
    eps: float
    scales: tuple[float, float]  # of the caches, see `store_kv`


@runtime_checkable
class RotatingBackend(AttentionBackend, Protocol):
    """Backend that also normalizes, rotates and caches new tokens in a step that has decodes only."""

    def attend_new(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, new: NewTokens, params: AttentionParams
    ) -> torch.Tensor:
        """Normalize and rotate queries and new keys, store keys and values, and attend.

        Keys and values go to the batch's `slot_mapping`; rows whose results are not used may share a slot. Cached keys
        are multiplied by the first of `new.scales`. Raises ValueError if a row has more than one new token.
        """
        ...


class LatentQueries(NamedTuple):
    """Queries of latent attention, and the projections of latents to keys and values."""

    q_nope: torch.Tensor  # [tokens, heads, nope_dim]: multiplied by `w_uk`, then by latents
    q_pe: torch.Tensor  # [tokens, heads, rope_dim]
    w_uk: torch.Tensor  # [heads, nope_dim, rank]
    w_uv: torch.Tensor  # [heads, value_dim, rank]


@runtime_checkable
class ExpandingBackend(AttentionBackend, Protocol):
    """Backend of latent attention that computes some prompts in expanded form: with the keys and values of heads."""

    @property
    def expands(self) -> bool:
        """True if the planned step has such prompts."""
        ...

    def attend_expanded(
        self, queries: LatentQueries, k_cache: torch.Tensor, params: AttentionParams, key_scale: float = 1.0
    ) -> torch.Tensor:
        """Return the attention [tokens, heads, value_dim] of rotated queries over cached vectors, see `latent_caches`.

        `queries.q_pe` is rotated, and vectors are in the cache.
        """
        ...
