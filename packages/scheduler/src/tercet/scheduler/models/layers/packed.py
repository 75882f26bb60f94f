"""Inputs of an encoder's step: concatenated without padding, with attention within each."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from tercet.kernels.attention.api import AttentionParams


class Segment(NamedTuple):
    """Adjacent inputs of equal length, which form the rows of one tensor."""

    start: int
    rows: int
    length: int


class Packed:
    """The inputs of one step, sorted by length; `lengths` has the length of each.

    With `causal`, a token sees itself and earlier tokens; otherwise it sees all of its input.
    """

    def __init__(
        self, input_ids: torch.Tensor, token_types: torch.Tensor | None, lengths: Sequence[int], *, causal: bool
    ) -> None:
        self.input_ids = input_ids  # int64 [tokens]
        self.token_types = token_types  # int64 [tokens]
        self.runs = _runs(lengths)
        device = input_ids.device
        self.positions = torch.cat([torch.arange(run.length, device=device).repeat(run.rows) for run in self.runs])
        self.replaced = None  # an encoder reads text only
        self._causal = causal
        self._masks: dict[tuple[int, int], torch.Tensor | None] = {}

    def attend(
        self,
        layer_id: int,  # noqa: ARG002 - nothing is kept between steps
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Attend with q [tokens, heads, head_dim] over k and v [tokens, kv_heads, head_dim]; return q's shape.

        A window is the number of tokens that a causal token sees, including itself, or that another token sees on
        either side. Raise ValueError for soft caps and sinks, which no encoder has.
        """
        if params.softcap or params.sinks is not None:
            raise ValueError("attention over whole inputs has neither soft caps nor sinks")
        out = torch.empty_like(q)
        grouped = q.shape[1] != k.shape[1]
        for run in self.runs:
            queries, keys, values = (_rows(x, run).transpose(1, 2) for x in (q, k, v))
            mask = self._mask(run.length, params.window)
            causal = self._causal and mask is None
            seen = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, is_causal=causal, scale=params.scale, enable_gqa=grouped
            )
            _rows(out, run).copy_(seen.transpose(1, 2))
        return out

    def first(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the first token's vector of each input: [tokens, hidden] -> [inputs, hidden]."""
        return torch.cat([_rows(hidden, run)[:, 0] for run in self.runs])

    def last(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the last token's vector of each input."""
        return torch.cat([_rows(hidden, run)[:, -1] for run in self.runs])

    def last_except(self, hidden: torch.Tensor, token: int) -> torch.Tensor:
        """Return the vector of each input's last token that is not `token`; of its first token if all are."""
        found = []
        for run in self.runs:
            others = _rows(self.input_ids, run) != token
            places = (others * torch.arange(run.length, device=others.device)).argmax(1)
            found.append(_rows(hidden, run)[torch.arange(run.rows, device=others.device), places])
        return torch.cat(found)

    def counts_excluding(self, token: int) -> torch.Tensor:
        """For each token, count its input's tokens up to and including it that are not `token`; return 0 for `token`
        itself.
        """
        others = [_rows(self.input_ids, run) != token for run in self.runs]
        return torch.cat([(each.cumsum(1) * each).flatten() for each in others])

    def mean(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the mean over the tokens of each input."""
        return torch.cat([_rows(hidden, run).mean(1) for run in self.runs])

    def largest(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the elementwise maximum over the tokens of each input."""
        return torch.cat([_rows(hidden, run).amax(1) for run in self.runs])

    def _mask(self, length: int, window: int) -> torch.Tensor | None:
        """Return a visibility mask, bool [length, length]; None if the plain kernel's masks suffice."""
        if not window or length <= window:
            return None
        key = length, window
        if key not in self._masks:
            place = torch.arange(length, device=self.input_ids.device)
            behind = place[:, None] - place
            self._masks[key] = (behind >= 0) & (behind < window) if self._causal else behind.abs() <= window
        return self._masks[key]


def _rows(x: torch.Tensor, run: Segment) -> torch.Tensor:
    """Return a run of x [tokens, ...] as a view [rows, length, ...]."""
    return x[run.start : run.start + run.rows * run.length].view(run.rows, run.length, *x.shape[1:])


def _runs(lengths: Sequence[int]) -> list[Segment]:
    runs: list[Segment] = []
    start = 0
    for length in lengths:
        if runs and runs[-1].length == length:
            runs[-1] = runs[-1]._replace(rows=runs[-1].rows + 1)
        else:
            runs.append(Segment(start, 1, length))
        start += length
    return runs
