"""Text of each token id, in tables that are filled from the tokenizer as ids are first seen.

Nearly every id adds the same text in any context, so a stream needs one dict lookup a token. Three exceptions: a token
may hold a part of a UTF-8 character, the first token of a text may lose its leading space, and a few decoders depend on
neighbouring tokens. The first two are handled exactly here and in `decode_status`; a tokenizer of the third kind gets
no table.
"""

import codecs
import re
from dataclasses import dataclass

import msgspec
from tokenizers import Tokenizer

from tercet.detokenizer.errors import TokenizerError
from tercet.protocol.json_files import error_line, parse_json

Piece = str | bytes | None
"""Complete text, bytes that need neighbours to become text, or None: the id adds nothing."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LOSSY = "replace"
_EACH_BYTE = "tercet.each-byte"
codecs.register_error(_EACH_BYTE, lambda error: ("\ufffd" * (error.end - error.start), error.end))  # type: ignore[attr-defined]


class _Decoder(msgspec.Struct):
    """Part of a tokenizer.json's decoder that determines the rules by which pieces are joined."""

    type: str
    decoders: list["_Decoder"] = []
    content: str = ""
    start: int = 0
    stop: int = 0


class _TokenizerFile(msgspec.Struct):
    decoder: _Decoder | None = None


@dataclass(frozen=True)
class Joining:
    """Rules by which a decoder joins pieces."""

    byte_level: bool = False
    byte_fallback: bool = False
    first_differs: bool = False

    @property
    def errors(self) -> str:
        """Codecs error handler: byte-level gives one U+FFFD per broken character, byte fallback one per byte."""
        return _EACH_BYTE if self.byte_fallback else _LOSSY


def joining_of(decoder: _Decoder | None) -> Joining | None:
    """Return the rules of a decoder whose pieces do not depend on their neighbours; None for any other decoder."""
    if decoder is None:
        return None
    chain = decoder.decoders if decoder.type == "Sequence" else [decoder]
    match [step.type for step in chain]:
        case ["ByteLevel"] | ["ByteLevel", "Fuse"]:
            return Joining(byte_level=True)
        case ["WordPiece"] | ["Metaspace"]:
            return Joining(first_differs=True)
        case ["ByteFallback", "Metaspace"]:
            return Joining(first_differs=True, byte_fallback=True)
        case [*replaces, "ByteFallback", "Fuse"] if set(replaces) <= {"Replace"}:
            return Joining(byte_fallback=True)
        case [*replaces, "ByteFallback", "Fuse", "Strip"] if set(replaces) <= {"Replace"}:
            strip = chain[-1]
            one_space = strip.start <= 1 and strip.stop == 0
            return Joining(byte_fallback=True, first_differs=strip.start > 0) if one_space else None
        case _:
            return None


def _byte_alphabet() -> dict[str, int]:
    """Return the printable characters of byte-level BPE for the 256 bytes (GPT-2's `bytes_to_unicode`, inverted)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


class PieceTable(dict[int, Piece]):
    """Token id to piece, filled on first use. Ids outside the vocabulary add nothing and are not cached."""

    def __init__(self, vocabulary: "Vocabulary", skip_special_tokens: bool) -> None:
        super().__init__()
        self._vocabulary = vocabulary
        self._skip = skip_special_tokens

    def __missing__(self, token_id: int) -> Piece:
        token = self._vocabulary.token(token_id, self._skip)
        if token is None:
            return None
        piece = self[token_id] = self._vocabulary.piece(token_id, token)
        return piece


class Vocabulary:
    """Tokenizer, parsed from the text of its tokenizer.json, and the tables made from it."""

    def __init__(self, tokenizer_json: str) -> None:
        """Parse a tokenizer.json. Raises TokenizerError for any other text."""
        try:
            self._read(tokenizer_json)
        except (MemoryError, KeyboardInterrupt, SystemExit):
            raise
        except (
            BaseException
        ) as error:  # tokenizers raises plain Exception, and a panic in Rust is not even an Exception
            raise TokenizerError(f"not a tokenizer.json: {error_line(error)}") from error

    def _read(self, tokenizer_json: str) -> None:
        parse_json(tokenizer_json)  # reject the same files as a frontend
        self.tokenizer: Tokenizer = Tokenizer.from_str(tokenizer_json)
        joining = joining_of(msgspec.json.decode(tokenizer_json, type=_TokenizerFile).decoder)
        special = {i: token for i, token in self.tokenizer.get_added_tokens_decoder().items() if token.special}
        self.special_ids = frozenset(special)
        self._special = {token.content for token in special.values()}
        self._anchor = 0
        self._anchor_chars = 0
        if joining is not None and not joining.byte_level and not self._find_anchor():
            joining = None
        self.joining = joining
        """None if the decoder depends on neighbouring tokens: then only `decode` is correct."""
        self._tables = {skip: PieceTable(self, skip) for skip in (False, True)}

    def table(self, skip_special_tokens: bool) -> PieceTable:
        """Return the pieces with or without special tokens. Shared, and safe to read while another thread fills it."""
        return self._tables[skip_special_tokens]

    def token(self, token_id: int, skip_special_tokens: bool) -> str | None:
        """Return the token of an id; None for an id that adds nothing to a text, which decoders never see."""
        token = self.tokenizer.id_to_token(token_id) if token_id >= 0 else None
        return None if skip_special_tokens and token in self._special else token

    def piece(self, token_id: int, token: str) -> str | bytes:
        """Return the text that a token adds to a text that has begun."""
        assert self.joining is not None
        if self.joining.byte_level:
            raw = bytes(_ALPHABET[c] for c in token) if all(c in _ALPHABET for c in token) else token.encode()
        elif self.joining.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            raw = bytes.fromhex(match[1])
        else:
            return self.decode([self._anchor, token_id])[self._anchor_chars :]
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return raw

    def decode(self, ids: list[int]) -> str:
        """Return the text of all the ids, including special ones."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def _find_anchor(self) -> bool:
        """Find a token with text, after which other tokens' pieces are measured; return whether there is one."""
        for token_id in range(self.tokenizer.get_vocab_size()):
            token = self.token(token_id, skip_special_tokens=True)
            if token and not _BYTE_TOKEN.fullmatch(token) and (text := self.decode([token_id])):
                self._anchor, self._anchor_chars = token_id, len(text)
                return True
        return False
