"""Log-probabilities beside the text that they are of, and none of what is reasoning or a call."""

import codecs
from collections.abc import Container, Iterator, Sequence
from typing import Any

import msgspec

from tercet.frontend.api.openai.logprobs import chat_logprobs, sliced, without_end
from tercet.frontend.manager.req_state import Update
from tercet.frontend.model.token_bytes import TokenBytes
from tercet.frontend.parsers.events import Event, TextDelta

Scores = list[dict[str, Any]]


class ScoredText:
    """Reads one choice token by token: only so can it be told which of them are text, however many arrive at once.

    Tokens that are `hidden` leave nothing in the text.
    """

    def __init__(self, names: TokenBytes, hidden: Container[int] = ()) -> None:
        self._names = names
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._awaited = ""
        """What tokens spell that has not arrived: a stop string may have begun in it."""
        self._open: list[tuple[str, Scores]] = []
        """Tokens of which it is not known yet what they are: what each spells, and its log-probability."""
        self._reasoned = 0

    @property
    def rest(self) -> Scores:
        """Those of tokens that nothing was found in."""
        return [score for _, scores in self._open for score in scores]

    def pieces(self, update: Update) -> Iterator[Update]:
        """The update as one for each of its tokens. Ask for what is `told` after each."""
        ids, text = update.token_ids, update.text
        scores = self._scores(update)
        for place, token_id in enumerate(ids):
            score = next(scores, None)
            self._read(token_id, [] if score is None else [score])
            if place + 1 < len(ids):
                piece = self._arrived(text)
                text = text[len(piece) :]
                yield Update(update.index, piece, [token_id], [], None)
        self._awaited = self._awaited[len(text) :] if self._awaited.startswith(text) else ""
        yield msgspec.structs.replace(update, text=text, token_ids=ids[-1:], logprobs=[])

    def _scores(self, update: Update) -> Iterator[dict[str, Any]]:
        """Yield the log-probability of each token, a few of them written at a time."""
        for ids, part in sliced(without_end(update.token_ids, update.finish), update.logprobs):
            yield from chat_logprobs(self._names, ids, [part])["content"]

    def told(self, findings: Sequence[Event], reasoned: int) -> Scores:
        """Those to tell with what was found in a piece; `reasoned` counts the tokens of reasoning so far."""
        thought, self._reasoned = reasoned > self._reasoned, reasoned
        text = "".join(each.text for each in findings if isinstance(each, TextDelta))
        if text:
            return self._of(text)
        if findings or thought:
            self._open = []
        return []

    def _of(self, text: str) -> Scores:
        """Those of the tokens that spelt a text just found; what stands before it is none, and what follows waits."""
        spelt_all = "".join(spelt for spelt, _ in self._open)
        begin = 0 if spelt_all.startswith(text) else max(spelt_all.rfind(text), 0)
        told: Scores = []
        place = 0
        for number, (spelt, scores) in enumerate(self._open):
            if place >= begin + len(text):
                self._open = self._open[number:]
                return told
            if place >= begin or place + len(spelt) > begin:
                told += scores
            place += len(spelt)
        self._open = []
        return told

    def _read(self, token_id: int, scores: Scores) -> None:
        spelt = "" if token_id in self._hidden else self._decoder.decode(self._names[token_id])
        self._open.append((spelt, scores))
        self._awaited += spelt

    def _arrived(self, text: str) -> str:
        """What of the text the tokens so far have completed; none where it cannot be told, and a later one has it."""
        for piece in (self._awaited, self._awaited.removeprefix(" ")):  # SentencePiece's first has a space too many
            if piece and text.startswith(piece):
                self._awaited = ""
                return piece
        return ""
