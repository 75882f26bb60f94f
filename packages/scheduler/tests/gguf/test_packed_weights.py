"""Weights of a GGUF file that stay in few bits in memory, against the same weights dequantized."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from packages.scheduler.tests.gguf.test_blocks import random_rows
from tercet.kernels.ops.quantized import QuantizedWeight, dequantize
from tercet.scheduler.gguf import gguf_directory
from tercet.scheduler.gguf.gguf_file import map_file
from tercet.scheduler.gguf.gguf_tensors import CheckpointTensor, Piece
from tercet.scheduler.gguf.gguf_values import GGUFValues
from tercet.scheduler.models.layers.linear import Linear, MappedRows
from tercet.scheduler.models.weights.tensor_files import GGUFTensors


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q6_K", "Q8_0"])
def test_lent_blocks_have_the_values(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_rows(kind)
    (tmp_path / "model.gguf").write_bytes(rows.tobytes())
    piece = Piece(kind, (5, 512), 0, rows.nbytes)
    stored = {"w": CheckpointTensor("w", (5, 512), (piece,))}
    monkeypatch.setattr(gguf_directory, "stored_tensors", lambda _: stored)
    file = GGUFTensors(tmp_path / "model.gguf")
    blocks = file.get_blocks("w")
    assert isinstance(blocks, QuantizedWeight)
    expected = torch.from_numpy(gguf.dequantize(rows, gguf.GGMLQuantizationType[kind]))
    assert torch.equal(dequantize(blocks), expected)
    assert torch.equal(file.get_tensor("w"), expected)
    taken: list[str] = []
    for _ in range(2):
        linear = Linear(512, 5, bias=False, dtype=torch.float32)
        linear.set_mapped(0, MappedRows(blocks, lambda: taken.append("w")))
        assert torch.equal(linear.take()[0], expected)
    linear = Linear(512, 5, bias=False, dtype=torch.float32)
    assert linear.take_blocks() is None
    linear.set_mapped(0, MappedRows(blocks, lambda: taken.append("w")))
    assert linear.take_blocks() == [blocks]
    assert taken == ["w"] * 3
    file.close()


def test_centered_norms_and_float_weights_are_not_lent(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(np.ones((4, 32), np.float32).tobytes())
    tensor = CheckpointTensor("w", (4, 32), (Piece("F32", (4, 32), 0, 512),))
    with map_file(tmp_path / "model.gguf") as data:
        assert GGUFValues(data, {"w": tensor}).blocks("w") is None
