"""Values of every block type against the `gguf` package, and names of tensors that have no place."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from tercet.scheduler.gguf.gguf_file import GGUFTensor, map_file, read_gguf
from tercet.scheduler.gguf.gguf_paths import GGUFError
from tercet.scheduler.gguf.gguf_tensors import checkpoint_tensors
from tercet.scheduler.gguf.gguf_values import float_values

TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
TYPES += ["IQ4_NL", "IQ4_XS", "MXFP4"]


def write(path: Path, kind: str) -> np.ndarray:
    """Write random blocks of a type, and return what the package says they are."""
    found = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[found]
    chance = np.random.default_rng(TYPES.index(kind))
    stored = chance.integers(0, 256, (8, 512 // block * size), np.uint8)
    if block > 1:
        stored.reshape(-1, size)[:, 1::2] &= 0x3B  # no half is infinite or NaN
        stored.reshape(-1, size)[:, ::2] &= 0x3B
    else:
        stored.reshape(-1, size)[:, -1] &= 0x3B
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.ffn_up.weight", stored, raw_dtype=found)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if kind in ("F32", "F16"):
        return stored.view(kind.replace("F", "<f").replace("32", "4").replace("16", "2")).astype(np.float32)
    values: np.ndarray = gguf.dequantize(stored, found)
    return values


@pytest.mark.parametrize("kind", TYPES)
def test_values_equal_the_package_s(kind: str, tmp_path: Path) -> None:
    expected = write(tmp_path / "one.gguf", kind)
    tensor = read_gguf(tmp_path / "one.gguf").tensors["blk.0.ffn_up.weight"]
    assert (tensor.type, tensor.shape) == (kind, (8, 512))
    with map_file(tmp_path / "one.gguf") as data:
        actual = float_values(data, tensor.type, tensor.shape, tensor.start, tensor.end)
    assert np.isfinite(expected).all()
    torch.testing.assert_close(torch.from_numpy(actual), torch.from_numpy(expected), rtol=0, atol=0)


def test_a_tensor_without_a_place_is_refused() -> None:
    config = {"architectures": ["Qwen2ForCausalLM"]}
    stored = GGUFTensor("blk.0.ssm_a.weight", "F32", (4,), 0, 16)
    with pytest.raises(GGUFError, match="ssm_a"):
        checkpoint_tensors({stored.name: stored}, config)
