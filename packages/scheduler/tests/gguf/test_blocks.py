"""Matrices taken apart into codes, scales and minimums, against the `gguf` package's dequantization."""

import gguf
import numpy as np
import pytest

from tercet.scheduler.gguf.blocks import block_matrix

KINDS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2)}
HALVES |= {"Q6_K": (208,)}
"""Bytes at which a block has a float16; 0 unless named."""


def random_rows(kind: str) -> np.ndarray:
    """Random bytes, with scales of a usual size."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    chance = np.random.default_rng(KINDS.index(kind))
    rows = chance.integers(0, 256, (5 * 512 // block, size), np.uint8)
    for at in HALVES.get(kind, (0,)):
        scales = chance.normal(0, 0.02, (len(rows), 1)).astype("<f2")
        rows[:, at : at + 2] = scales.view(np.uint8)
    return rows.reshape(5, -1)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost(kind: str) -> None:
    rows = random_rows(kind)
    matrix = block_matrix(kind, rows)
    assert matrix is not None
    assert matrix.codes.shape == (5, 512)
    assert matrix.codes.dtype == (np.uint8 if matrix.bits == 4 else np.int8)
    assert matrix.bits == 8 or matrix.codes.max() < 16
    assert np.array_equal(matrix.values(), gguf.dequantize(rows, gguf.GGMLQuantizationType[kind]))


def test_other_types_are_not_taken_apart() -> None:
    assert block_matrix("MXFP4", np.zeros((1, 17), np.uint8)) is None
