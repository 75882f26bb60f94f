"""Detokenizer without sockets and clock: token ids in, text out, for every choice of every request routed here."""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Container, Sequence

from tercet.detokenizer.choice import Choice, DecodePlan, ReplyRoute
from tercet.detokenizer.errors import MalformedBatchError, SpecError
from tercet.detokenizer.tokenizer_store import TokenizerStore
from tercet.detokenizer.vocabulary import Vocabulary
from tercet.protocol.messages.messages import BatchStrOutput, BatchTokenIDOutput, FirstRow, FirstTextRow
from tercet.protocol.messages.values import FinishReason, FinishType, Held, Logprobs, pack_ints, unpack_ints

logger = logging.getLogger(__name__)

_ONE_TOKEN_EACH: dict[int, bytes] = {}
"""Number of rows to the offsets of that many one-token rows: comparing bytes is quicker than checking numbers."""

Key = str | tuple[str, int]
"""Key of a choice: the rid alone for index 0, the most common one, and (rid, index) for the others."""


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

    __slots__ = ("began", "columns", "cuts", "finishes", "of_frontend", "texts")

    def __init__(self, columns: Columns) -> None:
        self.began = time.perf_counter()
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
                chunks=opening.chunks,
                detokenize_seconds=time.perf_counter() - self.began if opening.chunks else 0.0,
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


def _key(rid: str, index: int) -> Key:
    return (rid, index) if index else rid


class DetokenizerManager:
    """Open choices, and the effects of messages on them.

    The manager asks no other process: a row that does not match the state held is dropped and counted. Recovery is the
    task of the frontend, which notices that a position never came.
    """

    def __init__(self, tokenizers: TokenizerStore, max_choices: int = 65536) -> None:
        self._tokenizers = tokenizers
        self._max_choices = max_choices
        self._choices: dict[Key, Choice] = {}
        self.counters: Counter[str] = Counter()
        """Counters: batches, tokens, dropped_{malformed,unknown,stale,seen,gap}, refused_specs, evicted, aborted."""

    def __len__(self) -> int:
        return len(self._choices)

    def handle(
        self, output: BatchTokenIDOutput, scheduler: str = "", linked: Container[str] | None = None
    ) -> list[tuple[str, BatchStrOutput]]:
        """Return the text of a step's tokens: (frontend's peer id, its rows) for each frontend with rows in it.

        If `linked` is given, no choice is opened for other frontends: their end would not be reported.
        """
        self.counters["batches"] += 1
        try:
            columns = Columns(output)
        except MalformedBatchError as error:
            self.counters["dropped_malformed"] += 1
            logger.warning("dropped batch of scheduler %s: %s", scheduler or "unknown", error)
            return []
        self.counters["tokens"] += len(columns.token_ids)
        rows = TextRows(columns)
        if output.openings:
            linked_rows = [each for each in output.openings if linked is None or each.frontend in linked]
            self._open(linked_rows, rows, scheduler)
        self._decode_rows(rows)
        return rows.messages()

    def drop_peer(self, peer: str) -> int:
        """Drop the choices of a frontend or scheduler that is down; return their number."""
        keys = [key for key, it in self._choices.items() if peer in (it.route.frontend, it.route.scheduler)]
        for key in keys:
            del self._choices[key]
        return len(keys)

    def drop_request(self, frontend: str, rid: str, indices: Sequence[int] = ()) -> int:
        """Drop choices (all if `indices` is empty) of a frontend's request; return their number."""
        keys = [
            key
            for key in ({_key(rid, index) for index in indices} or list(self._choices))
            if (it := self._choices.get(key)) and (it.route.frontend, it.route.rid) == (frontend, rid)
        ]
        for key in keys:
            del self._choices[key]
        self.counters["aborted"] += len(keys)
        return len(keys)

    def held(self, frontend: str) -> Held:
        """Return the choices open for one frontend. Safe to call from another thread."""
        mine = [choice for choice in list(self._choices.values()) if choice.route.frontend == frontend]
        return Held(
            rids=[choice.route.rid for choice in mine],
            indices=pack_ints(choice.route.index for choice in mine),
            attempts=pack_ints(choice.attempt for choice in mine),
            positions=pack_ints(choice.next for choice in mine),
        )

    def _decode_rows(self, rows: TextRows) -> None:
        """Set the text of every row. This is the hot path: a row that is one ordinary token costs a few lookups."""
        columns, output, of_frontend, texts = rows.columns, rows.columns.output, rows.of_frontend, rows.texts
        get, finishes, offsets, ids = self._choices.get, output.finishes, columns.offsets, columns.token_ids
        batch, row = self.counters["batches"], -1
        one_each = columns.one_token_each
        for rid, index, attempt, position in zip(
            output.rids, columns.indices, columns.attempts, columns.positions, strict=True
        ):
            row += 1
            choice = get((rid, index) if index else rid)
            if choice is None:
                if row not in rows.finishes:  # refused specs have finished their rows already
                    self.counters["dropped_unknown"] += 1
                continue
            if choice.next == position and choice.attempt == attempt:
                if one_each and row not in finishes:
                    text = None if choice.piece_table is None else choice.piece_table[ids[row]]
                    if text.__class__ is not str or (
                        choice.stop_first_chars and not choice.stop_first_chars.isdisjoint(text)
                    ):
                        text = choice.step(ids[row])
                    if text.__class__ is str:
                        texts[row] = text
                        choice.next = position + 1
                        choice.last_batch = batch
                        of_frontend[choice.route.frontend].append(row)
                        continue
            elif not self._fits(choice, attempt, position, offsets[row + 1] - offsets[row], row in finishes):
                continue
            choice.last_batch = batch
            self._decode_row(rows, row, choice)

    def _fits(self, choice: Choice, attempt: int, position: int, count: int, finishes: bool) -> bool:
        """Return whether a row that does not directly continue its choice has anything new; count it if not."""
        if attempt != choice.attempt:
            self.counters["dropped_stale" if attempt < choice.attempt else "dropped_unknown"] += 1
        elif position > choice.next:
            self.counters["dropped_gap"] += 1
        elif position + count > choice.next or (finishes and position + count == choice.next):
            return True
        else:
            self.counters["dropped_seen"] += 1
        return False

    def _decode_row(self, rows: TextRows, row: int, choice: Choice) -> None:
        """Decode a row that needs its choice's whole state: held text, several ids, a finish."""
        columns = rows.columns
        seen = choice.next - columns.positions[row]
        ids = columns.token_ids[columns.offsets[row] + seen : columns.offsets[row + 1]]
        decoded = choice.append(ids, columns.output.finishes.get(row))
        rows.texts[row] = decoded.text
        rows.cut(row, seen, decoded.count)
        rows.of_frontend[choice.route.frontend].append(row)
        if decoded.finish is not None:
            rows.finishes[row] = decoded.finish
            del self._choices[_key(choice.route.rid, choice.route.index)]

    def _open(self, openings: list[FirstRow], rows: TextRows, scheduler: str) -> None:
        """Open the choices whose first rows these are. A spec that cannot be followed ends its choice."""
        columns, plans = rows.columns, dict[bytes, DecodePlan]()
        for opening in openings:
            row = opening.row
            rid, index, attempt = columns.output.rids[row], columns.indices[row], columns.attempts[row]
            held = self._choices.get(_key(rid, index))
            if held is not None and held.attempt >= attempt:
                continue
            try:
                if (plan := plans.get(opening.decode_spec)) is None:
                    plan = plans[opening.decode_spec] = DecodePlan(opening.decode_spec)
                vocabulary = self._vocabulary(plan.spec.tokenizer, scheduler)
                choice = Choice(ReplyRoute(rid, index, attempt, opening.frontend, scheduler), plan, vocabulary)
            except SpecError as error:
                self.counters["refused_specs"] += 1
                self._refuse(rows, row, opening.frontend, str(error))
                self._choices.pop(_key(rid, index), None)
                continue
            self._choices[_key(rid, index)] = choice
            choice.last_batch = self.counters["batches"]
            if len(self._choices) > self._max_choices:
                self._evict()

    def _refuse(self, rows: TextRows, row: int, frontend: str, message: str) -> None:
        if row not in rows.finishes:
            rows.of_frontend[frontend].append(row)
        rows.finishes[row] = FinishReason(FinishType.ERROR, message=message)
        rows.cut(row, 0, 0)

    def _vocabulary(self, sha256: str, scheduler: str) -> Vocabulary:
        """Return a tokenizer. Raises SpecError if it is not loaded."""
        found = self._tokenizers.get(sha256, scheduler)
        if found is None:
            raise SpecError(f"the detokenizer does not have the tokenizer {sha256[:64] or f'of {scheduler}'}")
        return found

    def _evict(self) -> None:
        """Drop a sixteenth of the choices, those idle for longest: most likely their schedulers no longer send them."""
        oldest = sorted(self._choices, key=lambda key: self._choices[key].last_batch)[
            : max(len(self._choices) // 16, 1)
        ]
        for key in oldest:
            del self._choices[key]
        self.counters["evicted"] += len(oldest)
        logger.warning("evicted choices=%d: max_choices=%d is reached", len(oldest), self._max_choices)
