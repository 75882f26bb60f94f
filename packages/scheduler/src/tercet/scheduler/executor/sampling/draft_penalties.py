"""Draft tokens of a step, which the penalties of later rows of the same slot must count."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tercet.kernels.ops.penalties import Penalties, TokenCounts, apply_penalties
from tercet.scheduler.device.staging import Array, HostToDevice


@dataclass(frozen=True, eq=False)
class DraftCounts:
    """Draft tokens before some rows: int64 [rows, most]; a row with fewer is padded with its first."""

    rows: Array  # [rows]: numbers among the sampling rows
    places: Array  # [rows]: positions in the list of requested rows
    tokens: Array
    times: Array  # int32 [rows, most]: how often each token occurs among the row's draft tokens


class DraftTokens:
    """The draft tokens before each sampling row. A slot's rows are in order; its first has none."""

    def __init__(self, slots: Sequence[int], assumed: Sequence[int | None]) -> None:
        """Collect them from the slot of each row and the draft token at its start, if any."""
        self.tokens: list[list[int]] = []
        self._before: list[int] = []
        last: dict[int, int] = {}
        for row, (slot, token) in enumerate(zip(slots, assumed, strict=True)):
            before = last.get(slot, -1)
            self.tokens.append([] if token is None else [*self.tokens[before], token])
            self._before.append(before)
            last[slot] = row

    def repeated(self, rows: Array, first: int) -> DraftCounts | None:
        """Return the draft tokens of `rows`, which count from row `first`; None if there are none."""
        places = [place for place, row in enumerate(rows.tolist()) if self.tokens[first + row]]
        if not places:
            return None
        drafts = [self.tokens[first + row] for row in rows[places].tolist()]
        most = max(map(len, drafts))
        tokens = np.array([each + each[:1] * (most - len(each)) for each in drafts], dtype=np.int64)
        times = [[each.count(token) for token in row] for each, row in zip(drafts, tokens.tolist(), strict=True)]
        return DraftCounts(rows[places], np.array(places), tokens, np.array(times, dtype=np.int32))

    def right(self, sampled: torch.Tensor, to_device: HostToDevice) -> torch.Tensor:
        """Return bool [rows]: whether earlier rows of a row's slot sampled all of its draft tokens.

        `sampled` (int64 [rows]) stays on the device: the host does not wait for it.
        """
        rows = [row for row, drafts in enumerate(self.tokens) if drafts]
        rows.sort(key=lambda row: (self._first(row), row))
        order = {row: place for place, row in enumerate(rows)}
        starts = [order[row] if len(self.tokens[row]) == 1 else -1 for row in rows]
        begin = np.maximum.accumulate(np.array(starts))
        expected = np.array([self.tokens[row][-1] for row in rows])
        given = [np.array(rows), np.array([self._before[row] for row in rows]), expected, begin]
        numbers, before, tokens, begins = to_device.send([each.astype(np.int64) for each in given])
        wrong = (sampled[before] != tokens).long()
        so_far = wrong.cumsum(0)
        right = torch.ones(len(self.tokens), dtype=torch.bool, device=sampled.device)
        right[numbers] = so_far - so_far[begins] + wrong[begins] == 0
        return right

    def _first(self, row: int) -> int:
        """Return the first row of a slot, which has no draft tokens."""
        while self.tokens[row]:
            row = self._before[row]
        return row


def penalize_drafts(
    logits: torch.Tensor,
    before: torch.Tensor,
    drafts: DraftCounts,
    counts: TokenCounts,
    sequences: torch.Tensor,
    penalties: Penalties,
    to_device: HostToDevice,
) -> None:
    """Penalize draft tokens again, in place, as if they were in `counts`.

    `before` [rows, most] is logits[ahead.rows, ahead.tokens] without penalties; `sequences` and `penalties` are of all
    penalized rows, and `drafts.places` indexes them.
    """
    rows, places, tokens, times = to_device.send([drafts.rows, drafts.places, drafts.tokens, drafts.times])
    own = sequences[places][:, None]
    strengths = penalties.repetition, penalties.frequency, penalties.presence
    repetition, frequency, presence = (strength[places] for strength in strengths)
    logits[rows[:, None], tokens] = apply_penalties(
        before,
        counts.output[own, tokens] + times,
        counts.prompt[own, tokens],
        Penalties(repetition=repetition, frequency=frequency, presence=presence),
    )
