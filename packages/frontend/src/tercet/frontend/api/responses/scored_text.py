"""Assignment of log-probabilities to text, leaving out those of reasoning and tool calls."""

import codecs
from collections.abc import Container, Iterator, Sequence
from itertools import takewhile
from typing import Any

import msgspec

from tercet.frontend.api.openai.logprobs import chat_logprobs, sliced
from tercet.frontend.manager.req_state import Update
from tercet.frontend.model.token_bytes import TokenBytes
from tercet.frontend.parsers.events import Event, TextDelta
from tercet.protocol.messages.values import FinishReason

Scores = list[dict[str, Any]]


class ScoredText:
    """Reader of one choice, token by token, to find out which tokens are text even if many arrive at once.

    Tokens in `hidden` add nothing to the text.
    """

    def __init__(self, names: TokenBytes, hidden: Container[int] = ()) -> None:
        self._names = names
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending_text = ""
        """Text of tokens that has not arrived yet, because it may start a stop string."""
        self._unclassified: list[tuple[str, Scores]] = []
        """Tokens that are not yet classified: the text of each, and its log-probability."""
        self._reasoning_tokens = 0

    def rest(self, finish: FinishReason) -> Scores:
        """Return the log-probabilities of a token that ended the text, and of the last ones that spell nothing.

        Other unclassified tokens are those of a call or tag that was cut off.
        """
        last = len(self._unclassified) - isinstance(finish.matched, int)
        silent = list(takewhile(lambda token: not token[0], reversed(self._unclassified[:last])))
        return [score for _, scores in self._unclassified[last - len(silent) :] for score in scores]

    def split(self, update: Update) -> Iterator[Update]:
        """Yield the update split into one per token. Call `logprobs_for` after each."""
        ids, text = update.token_ids, update.text
        scores = self._scores(update)
        for place, token_id in enumerate(ids):
            score = next(scores, None)
            self._read(token_id, [] if score is None else [score])
            if place + 1 < len(ids):
                piece = self._take_completed(text)
                text = text[len(piece) :]
                yield Update(update.index, piece, [token_id], [], None)
        self._pending_text = self._pending_text[len(text) :] if self._pending_text.startswith(text) else ""
        yield msgspec.structs.replace(update, text=text, token_ids=ids[-1:], logprobs=[])

    def _scores(self, update: Update) -> Iterator[dict[str, Any]]:
        """Yield the log-probability of each token; a few are written at a time."""
        for ids, part in sliced(update.token_ids, update.logprobs):
            yield from chat_logprobs(self._names, ids, [part])["content"]

    def logprobs_for(self, events: Sequence[Event], reasoning_tokens: int) -> Scores:
        """Return the log-probabilities for the events of a piece.

        `reasoning_tokens` is the number of reasoning tokens so far.
        """
        is_reasoning, self._reasoning_tokens = reasoning_tokens > self._reasoning_tokens, reasoning_tokens
        text = "".join(each.text for each in events if isinstance(each, TextDelta))
        if text:
            return self._logprobs_of(text)
        if events or is_reasoning:
            self._unclassified = []
        return []

    def _logprobs_of(self, text: str) -> Scores:
        """Return the log-probabilities of the tokens that spell `text`.

        Earlier tokens are dropped, later ones stay unclassified.
        """
        spelled_all = "".join(spelled for spelled, _ in self._unclassified)
        begin = 0 if spelled_all.startswith(text) else max(spelled_all.rfind(text), 0)
        logprobs: Scores = []
        place = 0
        for number, (spelled, scores) in enumerate(self._unclassified):
            if place >= begin + len(text):
                self._unclassified = self._unclassified[number:]
                return logprobs
            if place >= begin or place + len(spelled) > begin:
                logprobs += scores
            place += len(spelled)
        self._unclassified = []
        return logprobs

    def _read(self, token_id: int, scores: Scores) -> None:
        spelled = "" if token_id in self._hidden else self._decoder.decode(self._names[token_id])
        self._unclassified.append((spelled, scores))
        self._pending_text += spelled

    def _take_completed(self, text: str) -> str:
        """Return the part of the text that the tokens so far have completed.

        It is empty if that is unclear; a later token then has the text.
        """
        # SentencePiece adds a space to the first token.
        for piece in (self._pending_text, self._pending_text.removeprefix(" ")):
            if piece and text.startswith(piece):
                self._pending_text = ""
                return piece
        return ""
