"""Incremental decoders of one choice's ids: each character is returned once, as soon as it is complete."""

import codecs
from typing import Protocol

from tercet.detokenizer.vocabulary import PieceTable, Vocabulary


class TextStream(Protocol):
    """Incremental decoder: takes one id at a time and returns the text that is certain by then."""

    def push(self, token_id: int) -> str:
        """Return the text this id adds, including text it completes."""
        ...

    def flush(self) -> str:
        """Return the rest of the text. An incomplete character becomes U+FFFD."""
        ...

    @property
    def piece_table(self) -> PieceTable | None:
        """Table whose text pieces equal the result of the next `push`; None if they may differ."""
        ...


class DecodeStatus:
    """Stream of a tokenizer that has a table of pieces: the result of `tokenizer.decode`, in steps.

    It holds back at most the bytes of one incomplete character. Byte fallback departs from `tokenizer.decode` in one
    case, as SentencePiece does: in a run of byte tokens that has both complete characters and invalid bytes, the
    characters survive. (The tokenizers library discards the whole run, which would require holding back all of it.)
    """

    __slots__ = ("_errors", "_pending", "_prompt_replacements", "_started", "_table", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool) -> None:
        assert vocabulary.joining is not None
        self._vocabulary = vocabulary
        self._table = vocabulary.table(skip_special_tokens)
        self._errors = vocabulary.joining.errors
        self._started = not vocabulary.joining.first_differs
        self._pending = b""
        """Bytes of a character that is not complete yet."""
        self._prompt_replacements = 0
        """Number of U+FFFD that the prompt already shows for pending bytes of its own."""

    def prime(self, prompt_tail: list[int]) -> None:
        """Start the text after a prompt that ends with these ids."""
        for token_id in prompt_tail:
            self.push(token_id)
        self._prompt_replacements = len(self._join(b"", final=True)) if self._pending else 0

    @property
    def piece_table(self) -> PieceTable | None:
        """Table of pieces, unless a character is pending or the text has not begun."""
        return None if self._pending or not self._started else self._table

    def push(self, token_id: int) -> str:
        piece = self._table[token_id]
        if piece is None:
            return ""
        if not self._started:
            piece = self._first(token_id, piece)
        if isinstance(piece, str) and not self._pending:
            return piece
        text = self._decode_bytes(piece if isinstance(piece, bytes) else piece.encode(), final=False)
        if text and self._prompt_replacements:
            shown = min(self._prompt_replacements, len(text) - len(text.lstrip("\ufffd")))
            self._prompt_replacements, text = 0, text[shown:]
        return text

    def flush(self) -> str:
        """Return U+FFFD for the bytes of an incomplete character, without those that the prompt already shows."""
        text = self._decode_bytes(b"", final=True)
        text, self._prompt_replacements = text[self._prompt_replacements :], 0
        return text

    def _first(self, token_id: int, piece: str | bytes) -> str | bytes:
        """Return the piece of the first token, from which decoders may strip a leading space."""
        first = piece if isinstance(piece, bytes) else self._vocabulary.decode([token_id])
        self._started = bool(first or piece)
        return first

    def _decode_bytes(self, data: bytes, final: bool) -> str:
        data = self._pending + data
        text, used = codecs.utf_8_decode(data, self._errors, final)
        self._pending = data[used:]
        return text

    def _join(self, data: bytes, final: bool) -> str:
        return codecs.utf_8_decode(self._pending + data, self._errors, final)[0]


class WindowStatus:
    """Stream of any other tokenizer: decodes a short window of ids again for every id and returns the added text.

    Correct for decoders whose text only grows with more ids. The window moves on when it ends in a complete character.
    """

    __slots__ = ("_ids", "_read", "_shown", "_skip", "_vocabulary", "_waiting")

    piece_table: None = None

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._read = 0
        """Ids of the window whose text had all been returned when it last ended in a complete character."""
        self._shown = ""
        """Text of the window that has been returned."""
        self._waiting = 0
        """Ids in a row that only continued an incomplete character."""

    def prime(self, prompt_tail: list[int]) -> None:
        """Start the text after a prompt that ends with these ids."""
        for token_id in prompt_tail:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        if self._vocabulary.token(token_id, self._skip) is None:
            return ""
        self._ids.append(token_id)
        text = self._vocabulary.decode(self._ids)
        whole = text.rstrip("\ufffd")
        if whole == text or len(whole) > len(self._shown):
            self._waiting = 0
        elif self._waiting < 3:  # no character has more than four bytes
            self._waiting += 1
        else:
            whole, self._waiting = text, 0
        if len(whole) <= len(self._shown):
            return ""
        added, self._shown = whole[len(self._shown) :], whole
        if whole == text:
            self._advance_window()
        return added

    def _advance_window(self) -> None:
        """Drop the ids of the window's first part, unless the second part has no text to continue from."""
        fresh = self._ids[self._read :]
        if shown := self._vocabulary.decode(fresh):
            self._ids, self._shown = fresh, shown
        self._read = len(self._ids)

    def flush(self) -> str:
        """Return the text of the ids still held back."""
        return self._vocabulary.decode(self._ids)[len(self._shown) :] if self._ids else ""


def text_stream(vocabulary: Vocabulary, skip_special_tokens: bool, prompt_tail: list[int]) -> TextStream:
    """Return the right stream for a tokenizer, started after `prompt_tail`."""
    kind = WindowStatus if vocabulary.joining is None else DecodeStatus
    status = kind(vocabulary, skip_special_tokens)
    status.prime(prompt_tail)
    return status
