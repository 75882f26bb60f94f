"""Script that drives a manager by rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from tercet.detokenizer.detokenizer_manager import DetokenizerManager
from tercet.detokenizer.tokenizer_store import TokenizerStore
from tercet.detokenizer.vocabulary import Vocabulary
from tercet.protocol.messages.messages import BatchStrOutput, BatchTokenIDOutput, DecodeSpec, FirstRow
from tercet.protocol.messages.values import FinishReason, Logprobs, pack_ints, unpack_ints


@dataclass
class Row:
    """Row of a batch in either direction; `text` and `frontend` are set in rows that come back."""

    rid: str
    ids: Sequence[int]
    position: int = 0
    index: int = 0
    attempt: int = 0
    spec: DecodeSpec | bytes | None = None
    finish: FinishReason | None = None
    logprobs: Logprobs | None = None
    frontend: str = "f"
    text: str = field(default="", compare=False)


def batch(rows: list[Row]) -> BatchTokenIDOutput:
    offsets = [0]
    for row in rows:
        offsets.append(offsets[-1] + len(row.ids))
    openings = [
        FirstRow(
            row=n,
            frontend=row.frontend,
            decode_spec=row.spec if isinstance(row.spec, bytes) else msgspec.msgpack.encode(row.spec),
            prompt_tokens=7,
            cached_tokens=n,
            queue_time=n / 4,
        )
        for n, row in enumerate(rows)
        if row.spec is not None
    ]
    return BatchTokenIDOutput(
        rids=[row.rid for row in rows],
        indices=pack_ints(row.index for row in rows),
        attempts=pack_ints(row.attempt for row in rows),
        positions=pack_ints(row.position for row in rows),
        offsets=pack_ints(offsets),
        token_ids=pack_ints(token_id for row in rows for token_id in row.ids),
        openings=openings,
        finishes={n: row.finish for n, row in enumerate(rows) if row.finish},
        logprobs={n: row.logprobs for n, row in enumerate(rows) if row.logprobs},
    )


def rows_of(frontend: str, output: BatchStrOutput) -> Iterator[Row]:
    ids, offsets = unpack_ints(output.token_ids), unpack_ints(output.offsets)
    for n, (rid, text) in enumerate(zip(output.rids, output.texts, strict=True)):
        yield Row(
            rid,
            list(ids[offsets[n] : offsets[n + 1]]),
            unpack_ints(output.positions)[n],
            unpack_ints(output.indices)[n],
            unpack_ints(output.attempts)[n],
            finish=output.finishes.get(n),
            logprobs=output.logprobs.get(n),
            frontend=frontend,
            text=text,
        )


class Script:
    """Manager with one tokenizer, driven by rows."""

    def __init__(self, vocabulary: Vocabulary, max_choices: int = 100) -> None:
        self.tokenizers = TokenizerStore()
        self.tokenizers.add("s", "sha", vocabulary)
        self.manager = DetokenizerManager(self.tokenizers, max_choices)
        self._vocabulary = vocabulary

    def ids(self, text: str) -> list[int]:
        """Return one id per byte, so that a test knows the token of each byte."""
        token = self._vocabulary.tokenizer.token_to_id
        alphabet = {" ": "Ġ", "\n": "Ċ"}
        found = [token(alphabet.get(char, char)) for char in text]
        assert None not in found
        return [token_id for token_id in found if token_id is not None]

    def send(self, *rows: Row) -> list[Row]:
        return [row for frontend, out in self.manager.handle(batch(list(rows)), "s") for row in rows_of(frontend, out)]

    def texts(self, *rows: Row) -> list[str]:
        return [row.text for row in self.send(*rows)]
