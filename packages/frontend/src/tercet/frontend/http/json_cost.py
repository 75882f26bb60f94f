"""The cost of a JSON text, counted before it is parsed: a parser's time goes into values more than into bytes."""

import msgspec

PIECE = 65_536
"""Bytes that are looked through in one step."""


class Shape(msgspec.Struct):
    """The structural characters of a text, those within strings left out."""

    values: int = 0
    """Brackets that open and colons: objects, arrays and members of objects."""
    items: int = 0
    """Commas: members of objects and of arrays, but for the first of each."""


def most_marks(piece: bytes | bytearray) -> int:
    """Return the structural characters of a piece, with those in strings counted as well; this is quick."""
    return sum(map(piece.count, (b"{", b"[", b":", b",")))


class ShapeCounter:
    """Counts the structural characters of a text that is fed piece by piece.

    Of a text that is no JSON it counts at least what a parser sees before it finds that out.
    """

    def __init__(self) -> None:
        self.shape = Shape()
        self._in_string = False
        self._escapes = False
        """The last piece ended in the backslash of an escape."""

    def feed(self, piece: bytes | bytearray) -> None:
        """Count the next piece."""
        if self._escapes:
            piece = piece[1:]
        piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        self._escapes = piece.endswith(b"\\")
        parts = piece.split(b'"')
        outside = b"".join(parts[self._in_string :: 2])
        self._in_string ^= len(parts) % 2 == 0
        self.shape.values += outside.count(b"{") + outside.count(b"[") + outside.count(b":")
        self.shape.items += outside.count(b",")
