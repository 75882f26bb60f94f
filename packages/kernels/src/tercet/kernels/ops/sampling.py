"""Sampling: temperature, then top-k, then top-p of the rest, then min-p, then a Gumbel-max draw.

Tokens are ordered by logit, equal logits by id, so that every filter keeps the same set on every machine: top-k the
first k; top-p the shortest prefix of those whose probability, renormalized after top-k, is at least p; min-p those at
least `min_p` times as likely as the first. The drawn token has the largest logit / temperature + Gumbel noise
(`tercet.kernels.ops.philox`), which samples the renormalized distribution of the tokens kept.
"""

from dataclasses import dataclass, fields

import torch

from tercet.kernels.ops.philox import GUMBEL_MAX, NoiseKey, gumbel

_FIRST_WIDTH = 512
"""Candidates tried first: enough for most top-p and min-p, and far cheaper than a sorted vocabulary."""

_BLOCK = 1 << 22
"""Logits processed at a time, which bounds the memory of temporaries."""

_COLDEST = 1e-30
"""Lower bound of temperatures, so that no division overflows."""


@dataclass(frozen=True, eq=False)
class Filters:
    """Filters of each row, [rows] each: top_k int64 (0 is off), top_p float32 (1 is off), min_p float32 (0 is off)."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    def rows(self, index: torch.Tensor) -> "Filters":
        """Return the filters of some rows."""
        return Filters(*(getattr(self, name)[index] for name in FILTERS))


FILTERS = tuple(field.name for field in fields(Filters))


def rows_of_block(vocab: int) -> int:
    """Return the number of rows of logits that are processed at a time."""
    return max(1, _BLOCK // vocab)


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Return the likeliest token of each row, int64 [rows]; the lowest id wins ties. NaN counts as largest."""
    return logits.argmax(-1)


def argmax_with_values(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the largest logit of each row [rows], `argmax`): NaN where a row has one."""
    tokens = argmax(logits)
    return logits.gather(1, tokens[:, None])[:, 0], tokens


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Return `argmax`, but -1 where the largest logit is not finite: a row of -inf has no valid token."""
    return mask_non_finite(*argmax_with_values(logits))


def mask_non_finite(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return tokens int64 [rows], with -1 where the logit [rows] is not finite."""
    return torch.where(logits.abs() < float("inf"), tokens, -1)


def top_candidates(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `width` likeliest of each row in order: (logits [rows, width], ids int64 [rows, width]).

    Each token gets a unique key, its float32 logit as an ordered integer above its id, because the order of equal
    values in topk is undefined.
    """
    vocab = logits.shape[1]
    bits = (logits.float() + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    keys = (ordered << 32) + torch.arange(vocab - 1, -1, -1, device=logits.device)
    width = min(width, vocab)
    best = keys.sort(-1, descending=True).values if width == vocab else keys.topk(width, -1).values
    ids = vocab - 1 - (best & 0xFFFFFFFF)
    return logits.gather(1, ids), ids


def sample(logits: torch.Tensor, temperature: torch.Tensor, filters: Filters | None, noise: NoiseKey) -> torch.Tensor:
    """Draw a token for each row: int64 [rows], -1 where the largest logit is not finite (NaN, inf, or all -inf).

    logits [rows, vocab] of any floating dtype are used as float32; temperature float32 [rows] above 0. The draw of a
    row does not depend on other rows.
    """
    size = rows_of_block(logits.shape[1])
    if len(logits) <= size:
        return _sample(logits, temperature, filters, noise)
    blocks = torch.split(torch.arange(len(logits), device=logits.device), size)
    parts = [
        _sample(logits[rows], temperature[rows], filters.rows(rows) if filters else None, noise.rows(rows))
        for rows in blocks
    ]
    return torch.cat(parts)


def _sample(logits: torch.Tensor, temperature: torch.Tensor, filters: Filters | None, noise: NoiseKey) -> torch.Tensor:
    logits = logits.float()
    highest = logits.amax(-1, keepdim=True)
    scaled = (logits - highest) / temperature.clamp(min=_COLDEST)[:, None]  # the largest is 0
    if filters is None:
        return _draw_from_all(scaled, noise)
    return _draw_filtered(scaled, filters, noise, max(_FIRST_WIDTH, int(filters.top_k.max())))


def _draw_filtered(scaled: torch.Tensor, filters: Filters, noise: NoiseKey, width: int) -> torch.Tensor:
    """Draw from the first `width` candidates; rows whose filters may keep more draw again from all."""
    values, ids = top_candidates(scaled, width)
    keep, complete = _keep(scaled, values, filters)
    rows, columns = keep.nonzero(as_tuple=True)
    tokens = _draw(rows, ids[rows, columns], values[rows, columns], noise, len(scaled))
    if not bool(complete.all()):
        again = (~complete).nonzero()[:, 0]
        tokens[again] = _draw_filtered(scaled[again], filters.rows(again), noise.rows(again), scaled.shape[1])
    return tokens


def _keep(scaled: torch.Tensor, values: torch.Tensor, filters: Filters) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (candidates that every filter keeps [rows, width], rows that cannot keep others [rows])."""
    width = values.shape[1]
    rank = torch.arange(width, device=values.device)
    limited = filters.top_k > 0
    keep = (rank < filters.top_k[:, None]) | ~limited[:, None]
    in_top_k = values.masked_fill(~keep, float("-inf")).double().logsumexp(-1)
    total = torch.where(limited, in_top_k, scaled.logsumexp(-1).double())
    mass = (values.double() - total[:, None]).exp().cumsum(-1)
    before = torch.nn.functional.pad(mass, (1, -1))  # mass of all likelier candidates
    keep &= (before < filters.top_p[:, None]) | (filters.top_p[:, None] >= 1) | (rank == 0)
    floor = filters.min_p.log()[:, None]  # -inf where off
    keep &= (values >= floor) & (values > float("-inf"))
    complete = limited | (width == scaled.shape[1]) | ~keep[:, -1]
    return keep, complete


def _draw_from_all(scaled: torch.Tensor, noise: NoiseKey) -> torch.Tensor:
    """Draw from the whole vocabulary, without computing noise for tokens that cannot win.

    A draw from the likeliest few gives a score to beat; tokens further below it than the maximum noise are left out.
    """
    values, ids = top_candidates(scaled, min(64, scaled.shape[1]))
    rows = torch.arange(len(scaled), device=scaled.device).repeat_interleave(ids.shape[1])
    to_beat = _best(rows, values.flatten() + gumbel(noise, rows, ids.flatten()).double(), len(scaled))
    rows, tokens = (scaled.double() >= to_beat[:, None] - GUMBEL_MAX - 1e-3).nonzero(as_tuple=True)
    return _draw(rows, tokens, scaled[rows, tokens], noise, len(scaled))


def _draw(rows: torch.Tensor, tokens: torch.Tensor, values: torch.Tensor, noise: NoiseKey, count: int) -> torch.Tensor:
    """Return each row's token with the best score, from flat lists of (row, token, logit); the lowest id wins ties.

    Scores are float64 sums, so that ties practically never occur.
    """
    scores = values.double() + gumbel(noise, rows, tokens)
    best = _best(rows, scores, count)
    wins = (scores == best[rows]) & (scores > float("-inf"))
    no_token = torch.iinfo(torch.int64).max
    winner = torch.full((count,), no_token, device=tokens.device)
    winner = winner.scatter_reduce(0, rows[wins], tokens[wins], "amin")
    return torch.where(winner == no_token, -1, winner)


def _best(rows: torch.Tensor, scores: torch.Tensor, count: int) -> torch.Tensor:
    best = torch.full((count,), float("-inf"), dtype=scores.dtype, device=scores.device)
    return best.scatter_reduce(0, rows, scores, "amax")
