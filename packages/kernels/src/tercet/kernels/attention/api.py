"""What every attention backend is given and must give back."""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionBatch:
    """The rows of one step in one cache group: which new tokens each row brings, and where its keys and values lie.

    Row i owns tokens `query_start[i]:query_start[i + 1]` of the step. They are the last `host_query_lens[i]` of the
    row's `host_kv_lens[i]` tokens, and each sees itself and everything before it. Rows of one new token come first.
    Entries of `page_table` past a row's last page are never read.
    """

    query_start: torch.Tensor  # int32 [rows + 1]
    kv_lens: torch.Tensor  # int32 [rows], after this step
    page_table: torch.Tensor  # int32 [rows, max_pages]
    slot_mapping: torch.Tensor  # int64 [tokens]: page * page_size + offset of every new token
    page_size: int
    host_query_lens: list[int]
    host_kv_lens: list[int]

    @property
    def rows(self) -> int:
        """How many rows the step has."""
        return len(self.host_kv_lens)

    @cached_property
    def max_query(self) -> int:
        """The most new tokens of a row."""
        return max(self.host_query_lens)

    @cached_property
    def max_kv(self) -> int:
        """The longest row, in tokens, after this step."""
        return max(self.host_kv_lens)

    @cached_property
    def decodes(self) -> int:
        """How many leading rows bring exactly one token; later rows may too, and are then treated as extends."""
        return next((row for row, length in enumerate(self.host_query_lens) if length != 1), self.rows)


class AttentionBackend(Protocol):
    """One way of computing attention. An instance belongs to one cache group and holds the plan of one step."""

    @property
    def capturable(self) -> bool:
        """Whether a decode may be recorded in a graph: its tensors are read there, and what `plan` made of its lists.

        So `plan` is called for each step that a graph replays, with as many decodes as were recorded.
        """
        ...

    def plan(self, batch: AttentionBatch) -> None:
        """Prepare for a step: called once, before the `attend` of every layer."""
        ...

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of q [tokens, heads, head_dim] over caches [pages, page_size, kv_heads, head_dim].

        The new tokens' keys and values are in the caches already, which may be of another dtype than q, float8_e4m3fn
        among them: numbers in them mean what they are. `window` > 0 shows a token only itself and the
        `window - 1` tokens before it; `softcap` > 0 turns a score s into softcap * tanh(s / softcap); `sinks` [heads]
        adds a score without a value to each head's softmax. Returns [tokens, heads, head_dim] in q's dtype.
        """
        ...


@dataclass(frozen=True, eq=False, kw_only=True)
class NewTokens:
    """What one layer brings for the new tokens of a step, as it was projected: neither rotated nor cached."""

    k: torch.Tensor  # [tokens, kv_heads, head_dim], perhaps a part of one projection, as v
    v: torch.Tensor
    positions: torch.Tensor  # int64 [tokens]
    table: torch.Tensor  # of `rope_cache`, over the whole of a head
    norms: tuple[torch.Tensor, torch.Tensor] | None  # weights [head_dim] of the norms of queries and keys
    eps: float
    scales: tuple[float, float]  # of the caches: see `store_kv`


@runtime_checkable
class RotatingBackend(AttentionBackend, Protocol):
    """A backend that also does what comes before attention, in a step of decodes alone."""

    def attend_new(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        new: NewTokens,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`attend`, of queries and new tokens that are neither normalised nor rotated.

        Writes the new keys and values into the caches, at the batch's `slot_mapping`; several rows may have one slot,
        if none of them matters. Raises ValueError where a row brings more than one token.
        """
        ...
