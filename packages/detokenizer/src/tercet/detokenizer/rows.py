"""Rows of a batch: the columns of the input, and the messages to each frontend."""

from collections import defaultdict

from tercet.detokenizer.errors import MalformedBatchError
from tercet.protocol.messages.messages import BatchStrOutput, BatchTokenIDOutput, FirstTextRow
from tercet.protocol.messages.values import FinishReason, Logprobs, pack_ints, unpack_ints

_ONE_TOKEN_EACH: dict[int, bytes] = {}
"""Number of rows to the offsets of that many one-token rows: comparing bytes is quicker than checking numbers."""


def _numbers(data: bytes) -> list[int]:
    view = unpack_ints(data)
    return view.tolist() if isinstance(view, memoryview) else list(view)


class Columns:
    """BatchTokenIDOutput with its buffers as lists of numbers, checked against one another."""

    __slots__ = ("attempts", "indices", "offsets", "one_token_each", "output", "positions", "token_ids")

    def __init__(self, output: BatchTokenIDOutput) -> None:
        """Unpack the buffers and check their lengths. Raises MalformedBatchError."""
        self.output = output
        try:
            self.indices = _numbers(output.indices)
            self.attempts = _numbers(output.attempts)
            self.positions = _numbers(output.positions)
            self.offsets = _numbers(output.offsets)
            self.token_ids = _numbers(output.token_ids)
        except ValueError as error:
            raise MalformedBatchError(str(error)) from error
        rows = len(output.rids)
        if not len(self.indices) == len(self.attempts) == len(self.positions) == len(self.offsets) - 1 == rows:
            raise MalformedBatchError(f"columns of different lengths for {rows} rows")
        if (offsets := _ONE_TOKEN_EACH.get(rows)) is None and len(_ONE_TOKEN_EACH) < 4096:
            offsets = _ONE_TOKEN_EACH[rows] = pack_ints(range(rows + 1))
        self.one_token_each = output.offsets == offsets
        if not self.one_token_each and (self.offsets[0] != 0 or self.offsets != sorted(self.offsets)):
            raise MalformedBatchError("offsets that do not grow from 0")
        if self.offsets[-1] != len(self.token_ids):
            raise MalformedBatchError(f"{len(self.token_ids)} ids where the offsets end at {self.offsets[-1]}")
        if any(not 0 <= opening.row < rows for opening in output.openings):
            raise MalformedBatchError("an opening of a row that is not there")


class TextRows:
    """Result of a batch: texts by row, the rows of each frontend, and the differences from the input."""

    __slots__ = ("columns", "cuts", "finishes", "of_frontend", "texts")

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self.texts: list[str] = [""] * len(columns.output.rids)
        self.of_frontend: defaultdict[str, list[int]] = defaultdict(list)
        """Rows that are forwarded; all others are dropped."""
        self.cuts: dict[int, tuple[int, int]] = {}
        """Row to the (first, end) of its ids that count, for rows that forward fewer than came in."""
        self.finishes: dict[int, FinishReason] = {}

    def cut(self, row: int, skipped: int, count: int) -> None:
        """Forward `count` ids of a row, after the first `skipped`."""
        start, end = self.columns.offsets[row], self.columns.offsets[row + 1]
        if skipped or start + count != end:
            self.cuts[row] = (start + skipped, start + skipped + count)

    def messages(self) -> list[tuple[str, BatchStrOutput]]:
        """Return one message for each frontend that has rows."""
        untouched = len(self.of_frontend) == 1 and not self.cuts
        return [
            (frontend, self._whole() if untouched and len(rows) == len(self.texts) else self._part(rows))
            for frontend, rows in self.of_frontend.items()
        ]

    def _whole(self) -> BatchStrOutput:
        """Return all rows as they came, with their buffers reused."""
        output = self.columns.output
        return BatchStrOutput(
            rids=output.rids,
            indices=output.indices,
            attempts=output.attempts,
            positions=output.positions,
            offsets=output.offsets,
            token_ids=output.token_ids,
            texts=self.texts,
            openings=self._openings(None),
            finishes=self.finishes,
            logprobs=output.logprobs,
        )

    def _part(self, rows: list[int]) -> BatchStrOutput:
        """Return some of the rows, without the ids that were cut off."""
        columns, output = self.columns, self.columns.output
        bounds = list(zip(columns.offsets, columns.offsets[1:], strict=False))
        spans = [self.cuts.get(row, bounds[row]) for row in rows]
        if columns.one_token_each and not self.cuts:
            token_ids = [columns.token_ids[row] for row in rows]
            offsets = list(range(len(rows) + 1))
        else:
            token_ids, offsets = [], [0]
            for start, end in spans:
                token_ids += columns.token_ids[start:end]
                offsets.append(len(token_ids))
        skipped = {row: span[0] - columns.offsets[row] for row, span in self.cuts.items()}
        place = {row: n for n, row in enumerate(rows)}
        return BatchStrOutput(
            rids=[output.rids[row] for row in rows],
            indices=pack_ints([columns.indices[row] for row in rows]),
            attempts=pack_ints([columns.attempts[row] for row in rows]),
            positions=pack_ints([columns.positions[row] + skipped.get(row, 0) for row in rows]),
            offsets=pack_ints(offsets),
            token_ids=pack_ints(token_ids),
            texts=[self.texts[row] for row in rows],
            openings=self._openings(place),
            finishes={place[row]: finish for row, finish in self.finishes.items() if row in place},
            logprobs={place[row]: self._logprobs(row, it) for row, it in output.logprobs.items() if row in place},
        )

    def _openings(self, place: dict[int, int] | None) -> list[FirstTextRow]:
        return [
            FirstTextRow(
                row=opening.row if place is None else place[opening.row],
                prompt_tokens=opening.prompt_tokens,
                cached_tokens=opening.cached_tokens,
                prompt_logprobs=opening.prompt_logprobs,
                queue_time=opening.queue_time,
            )
            for opening in self.columns.output.openings
            if place is None or opening.row in place
        ]

    def _logprobs(self, row: int, logprobs: Logprobs) -> Logprobs:
        """Return the log-probabilities of the ids that count."""
        if row not in self.cuts:
            return logprobs
        first, end = (edge - self.columns.offsets[row] for edge in self.cuts[row])
        kept, wide = logprobs.first(end), 4 * first * logprobs.top
        if not first:
            return kept
        return Logprobs(kept.chosen[4 * first :], kept.top, kept.top_ids[wide:], kept.top_logprobs[wide:])
