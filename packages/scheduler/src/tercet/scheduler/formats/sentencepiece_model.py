"""Reader of SentencePiece models: the fields of the protobuf that tokenization depends on.

The file is unchecked. Every length in it is compared with what is left, so that memory is bounded by its size.
"""

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

_MOST_PIECES = 1 << 21
_WIRE_VARINT, _WIRE_64, _WIRE_BYTES, _WIRE_32 = 0, 1, 2, 5
_MOST_VARINT = 10  # bytes


class Algorithm(IntEnum):
    """Algorithm of a model, by its number in the file."""

    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


class PieceKind(IntEnum):
    """Kind of a piece, by its number in the file."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Piece(NamedTuple):
    """Token of a vocabulary; its place in the file is its id."""

    text: str
    score: float
    kind: PieceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class SentencePieceModel:
    """Vocabulary and settings of a model, with SentencePiece's defaults."""

    pieces: tuple[Piece, ...]
    algorithm: Algorithm = Algorithm.UNIGRAM
    byte_fallback: bool = False
    unk_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    pad_id: int = -1
    charsmap: bytes = b""
    """Compiled rules of normalization; empty for none."""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    treat_whitespace_as_suffix: bool = False

    def piece(self, piece_id: int) -> str | None:
        """Return the text of a piece; None for an id without one, as -1 is."""
        return self.pieces[piece_id].text if 0 <= piece_id < len(self.pieces) else None


class _Field(NamedTuple):
    """Field of a message: its number, and its value as an integer or as bytes."""

    number: int
    integer: int
    content: bytes

    @property
    def signed(self) -> int:
        """Return the value of an int32."""
        return ((self.integer & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


@lru_cache(maxsize=1)
def read_sentencepiece(content: bytes) -> SentencePieceModel:
    """Return the model in a file. Raises ValueError for any other file."""
    pieces: list[Piece] = []
    settings: dict[str, Any] = {}
    for field in _fields(content):
        if field.number == 1:
            pieces.append(_piece(field.content, len(pieces)))
            if len(pieces) > _MOST_PIECES:
                raise ValueError(f"it has more than {_MOST_PIECES} pieces")
        elif field.number == 2:
            settings |= _trainer(field.content)
        elif field.number == 3:
            settings |= _normalizer(field.content)
    if not pieces:
        raise ValueError("it has no pieces")
    algorithm = settings.pop("algorithm", Algorithm.UNIGRAM)
    if algorithm not in (Algorithm.UNIGRAM, Algorithm.BPE):
        raise ValueError(f"its algorithm is number {algorithm!r}: BPE and unigram are read")
    return SentencePieceModel(pieces=tuple(pieces), algorithm=Algorithm(algorithm), **settings)


_KINDS = frozenset(int(kind) for kind in PieceKind)


def _piece(content: bytes, place: int) -> Piece:
    text, score, kind = "", 0.0, 1
    for field in _fields(content):
        if field.number == 1:
            text = field.content.decode()
        elif field.number == 2:
            (score,) = struct.unpack("<f", field.integer.to_bytes(4, "little"))
        elif field.number == 3:
            kind = field.integer
    if not text or not math.isfinite(score) or kind not in _KINDS:
        raise ValueError(f"piece {place} has no text, no score or an unknown type")
    return Piece(text, score, PieceKind(kind))


_TRAINER = {24: "treat_whitespace_as_suffix", 35: "byte_fallback"}
_IDS = {40: "unk_id", 41: "bos_id", 42: "eos_id", 43: "pad_id"}
_NORMALIZER = {3: "add_dummy_prefix", 4: "remove_extra_whitespaces"}


def _trainer(content: bytes) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for field in _fields(content):
        if field.number == 3:
            settings["algorithm"] = field.integer
        elif name := _TRAINER.get(field.number):
            settings[name] = bool(field.integer)
        elif name := _IDS.get(field.number):
            settings[name] = field.signed
    return settings


def _normalizer(content: bytes) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for field in _fields(content):
        if name := _NORMALIZER.get(field.number):
            settings[name] = bool(field.integer)
        elif field.number == 2:
            settings["charsmap"] = field.content
        elif field.number == 5 and not field.integer:
            raise ValueError("escape_whitespaces is off, which is not supported")
    return settings


def _fields(content: bytes) -> Iterator[_Field]:
    """Yield the fields of a message. Raises ValueError for bytes that are not a message."""
    place = 0
    while place < len(content):
        key, place = _varint(content, place)
        number, wire = key >> 3, key & 7
        if wire == _WIRE_VARINT:
            value, place = _varint(content, place)
            yield _Field(number, value, b"")
            continue
        if wire == _WIRE_BYTES:
            length, place = _varint(content, place)
        elif wire in (_WIRE_64, _WIRE_32):
            length = 8 if wire == _WIRE_64 else 4
        else:
            raise ValueError(f"a field at byte {place} has the unknown wire type {wire}")
        if number == 0 or length > len(content) - place:
            raise ValueError(f"a field at byte {place} is longer than the file")
        part = content[place : place + length]
        place += length
        yield _Field(number, 0, part) if wire == _WIRE_BYTES else _Field(number, int.from_bytes(part, "little"), b"")


def _varint(content: bytes, place: int) -> tuple[int, int]:
    """Return an integer and the place behind it."""
    if place < len(content) and content[place] < 0x80:  # most are one byte
        return content[place], place + 1
    value = 0
    for count, byte in enumerate(content[place : place + _MOST_VARINT]):
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value, place + count + 1
    raise ValueError(f"the number at byte {place} has no end")
