"""Assignment of log-probabilities to text, leaving out those of reasoning and tool calls."""

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
    """Reader of one choice, token by token, to find out which tokens are text even if many arrive at once.

    Tokens in `hidden` add nothing to the text.
    """

    def __init__(self, names: TokenBytes, hidden: Container[int] = ()) -> None:
        self._names = names
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._awaited = ""
        """Text of tokens that has not arrived yet, because it may start a stop string."""
        self._open: list[tuple[str, Scores]] = []
        """Tokens that are not yet classified: the text of each, and its log-probability."""
        self._reasoned = 0

    @property
    def rest(self) -> Scores:
        """Return the log-probabilities of the unclassified tokens."""
        return [score for _, scores in self._open for score in scores]

    def pieces(self, update: Update) -> Iterator[Update]:
        """Yield the update split into one per token. Call `told` after each."""
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
        """Yield the log-probability of each token; a few are written at a time."""
        for ids, part in sliced(without_end(update.token_ids, update.finish), update.logprobs):
            yield from chat_logprobs(self._names, ids, [part])["content"]

    def told(self, findings: Sequence[Event], reasoned: int) -> Scores:
        """Return the log-probabilities for the events of a piece.

        `reasoned` is the number of reasoning tokens so far.
        """
        thought, self._reasoned = reasoned > self._reasoned, reasoned
        text = "".join(each.text for each in findings if isinstance(each, TextDelta))
        if text:
            return self._of(text)
        if findings or thought:
            self._open = []
        return []

    def _of(self, text: str) -> Scores:
        """Return the log-probabilities of the tokens that spell `text`.

        Earlier tokens are dropped, later ones stay unclassified.
        """
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
        """Return the part of the text that the tokens so far have completed.

        It is empty if that is unclear; a later token then has the text.
        """
        for piece in (self._awaited, self._awaited.removeprefix(" ")):  # SentencePiece adds a space to the first token
            if piece and text.startswith(piece):
                self._awaited = ""
                return piece
        return ""
