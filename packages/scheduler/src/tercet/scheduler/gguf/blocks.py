"""Matrices in few bits as GGUF stores them, taken apart without loss: codes, and a scale and minimum for each block.

Every value is scale * code + minimum, rounded to float32 as the `gguf` package's dequantization rounds it. The layouts
are those of ggml's block structs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
"""Values of the codes of IQ4_NL and IQ4_XS."""


@dataclass(frozen=True, eq=False)
class BlockMatrix:
    """A matrix [n, k] in few bits."""

    bits: int
    """4: codes are 0 to 15; 8: signed bytes."""
    codes: Array  # uint8 or int8 [n, k]
    block: int
    """Columns that share a scale: 16 or 32."""
    scales: Array  # float32 [n, k / block]
    minimums: Array | None  # the same; None for zeros

    def values(self) -> npt.NDArray[np.float32]:
        """Return the matrix in float32."""
        n, k = self.codes.shape
        values = self.scales[..., None] * self.codes.reshape(n, -1, self.block).astype(np.float32)
        if self.minimums is not None:
            values = values + self.minimums[..., None]
        whole: npt.NDArray[np.float32] = values.reshape(n, k)
        return whole


def block_matrix(kind: str, stored: npt.NDArray[np.uint8]) -> BlockMatrix | None:
    """Return the matrix of stored rows, uint8 [n, bytes of a row]; None for types that are not taken apart."""
    if kind not in _READERS:
        return None
    reader = _READERS[kind]
    n = len(stored)
    codes, scales, minimums = reader.read(stored.reshape(-1, reader.size))
    return BlockMatrix(
        bits=reader.bits,
        codes=codes.astype(np.uint8 if reader.bits == 4 else np.int8).reshape(n, -1),
        block=reader.block,
        scales=scales.reshape(n, -1),
        minimums=None if minimums is None else minimums.reshape(n, -1),
    )


Parts = tuple[Array, Array, Array | None]
"""Codes [blocks, columns], scales and minimums [blocks, parts of a block]."""


@dataclass(frozen=True)
class _Reader:
    size: int
    """Bytes of a stored block."""
    bits: int
    block: int
    read: Callable[[Array], Parts]


def _half(rows: Array, at: int) -> Array:
    """Return the float16 at a byte of each stored block, as float32 [blocks, 1]."""
    return np.ascontiguousarray(rows[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Array) -> Array:
    """Return the low halves of bytes, then the high ones, along the last dimension."""
    return np.concatenate([packed & 15, packed >> 4], -1)


def _fifth_bits(packed: Array) -> Array:
    """Return the bits of four bytes, each shifted by four: [blocks, 32]."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << 4


def _q4_0(rows: Array) -> Parts:
    scale = _half(rows, 0)
    return _nibbles(rows[:, 2:]), scale, scale * np.float32(-8)


def _q4_1(rows: Array) -> Parts:
    return _nibbles(rows[:, 4:]), _half(rows, 0), _half(rows, 2)


def _q5_0(rows: Array) -> Parts:
    codes = _nibbles(rows[:, 6:]) | _fifth_bits(rows[:, 2:6])
    return codes.astype(np.int8) - 16, _half(rows, 0), None


def _q5_1(rows: Array) -> Parts:
    return _nibbles(rows[:, 8:]) | _fifth_bits(rows[:, 4:8]), _half(rows, 0), _half(rows, 2)


def _q8_0(rows: Array) -> Parts:
    return rows[:, 2:].view(np.int8), _half(rows, 0), None


def _iq4_nl(rows: Array) -> Parts:
    return _IQ4[_nibbles(rows[:, 2:])], _half(rows, 0), None


def _iq4_xs(rows: Array) -> Parts:
    high = np.ascontiguousarray(rows[:, 2:4]).view("<u2")
    low = rows[:, 4:8]
    lows = np.stack([low & 15, low >> 4], -1).reshape(len(rows), 8)
    highs = (high >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
    scales = (lows | highs.astype(np.uint8) << 4).astype(np.int8) - np.int8(32)
    codes = _nibbles(rows[:, 8:].reshape(-1, 8, 16))
    return _IQ4[codes], _half(rows, 0) * scales.astype(np.float32), None


def _scales_and_minimums(packed: Array) -> tuple[Array, Array]:
    """Return the eight scales and minimums, of six bits each, that Q4_K and Q5_K pack into twelve bytes."""
    first, second, last = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (last & 15) | (first >> 6 << 4)], -1)
    minimums = np.concatenate([second & 63, (last >> 4) | (second >> 6 << 4)], -1)
    return scales.astype(np.float32), minimums.astype(np.float32)


def _q4_k(rows: Array) -> Parts:
    scales, minimums = _scales_and_minimums(rows[:, 4:16])
    codes = _nibbles(rows[:, 16:].reshape(-1, 4, 32))
    return codes, _half(rows, 0) * scales, -(_half(rows, 2) * minimums)


def _q5_k(rows: Array) -> Parts:
    scales, minimums = _scales_and_minimums(rows[:, 4:16])
    low = _nibbles(rows[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high = (rows[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return low | high << 4, _half(rows, 0) * scales, -(_half(rows, 2) * minimums)


def _q6_k(rows: Array) -> Parts:
    low = _nibbles(rows[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, 32)
    high = rows[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    codes = (low | (high.reshape(-1, 8, 32) & 3) << 4).astype(np.int8) - np.int8(32)
    return codes, _half(rows, 208) * rows[:, 192:208].view(np.int8).astype(np.float32), None


def _pairs_of_bits(packed: Array) -> Array:
    """Return the codes of two bits in 64 bytes: [blocks, 8, 32]."""
    spread = packed.reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return (spread & 3).reshape(-1, 8, 32)


def _q2_k(rows: Array) -> Parts:
    scales, minimums = (part.astype(np.float32) for part in (rows[:, :16] & 15, rows[:, :16] >> 4))
    return _pairs_of_bits(rows[:, 16:80]), _half(rows, 80) * scales, -(_half(rows, 82) * minimums)


def _q3_k(rows: Array) -> Parts:
    high = (rows[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    codes = _pairs_of_bits(rows[:, 32:96]) | high << 2
    packed = rows[:, 96:108]
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], -1)
    top = (packed[:, None, 8:] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]) & 3
    signed = (low | top.reshape(-1, 16) << 4).astype(np.int8) - np.int8(32)
    scales = _half(rows, 108) * signed.astype(np.float32)
    return codes, scales, scales * np.float32(-4)


_READERS = {
    "Q4_0": _Reader(18, 4, 32, _q4_0),
    "Q4_1": _Reader(20, 4, 32, _q4_1),
    "Q5_0": _Reader(22, 8, 32, _q5_0),
    "Q5_1": _Reader(24, 8, 32, _q5_1),
    "Q8_0": _Reader(34, 8, 32, _q8_0),
    "Q2_K": _Reader(84, 4, 16, _q2_k),
    "Q3_K": _Reader(110, 4, 16, _q3_k),
    "Q4_K": _Reader(144, 4, 32, _q4_k),
    "Q5_K": _Reader(176, 8, 32, _q5_k),
    "Q6_K": _Reader(210, 8, 16, _q6_k),
    "IQ4_NL": _Reader(18, 8, 32, _iq4_nl),
    "IQ4_XS": _Reader(136, 8, 32, _iq4_xs),
}
