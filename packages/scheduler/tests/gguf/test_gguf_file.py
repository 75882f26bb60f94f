"""GGUF files that are broken, hostile or split."""

import random
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from tercet.scheduler.gguf.gguf_file import read_gguf, read_parts
from tercet.scheduler.gguf.gguf_paths import GGUFError, split_parts
from tercet.scheduler.gguf_models import resolve_any_model
from tercet.scheduler.model_files import ModelError

HUGE = 1 << 60


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header(*entries: bytes, tensors: int, fields: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, fields) + b"".join(entries)


def field(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def valid() -> bytes:
    """A file of two tensors and three fields."""
    entries = (
        field("general.architecture", 8, text("llama")),
        field("llama.block_count", 4, struct.pack("<I", 1)),
        field("tokens", 9, struct.pack("<IQ", 8, 2) + text("a") + text("b")),
        tensor("one", (32, 2), 0, 0),
        tensor("two", (32, 1), 8, 256),
    )
    start = header(*entries, tensors=2, fields=3)
    return start + bytes(-len(start) % 32) + bytes(256 + 34)


BROKEN = {
    "no magic": b"GGML" + bytes(60),
    "empty": b"",
    "version": header(tensors=0, version=1) + bytes(32),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(32),
    "giant counts": header(tensors=HUGE, fields=HUGE),
    "a giant key": header(struct.pack("<Q", HUGE), tensors=0, fields=1),
    "a giant text": header(text("k") + struct.pack("<IQ", 8, HUGE), tensors=0, fields=1),
    "a giant list": header(field("k", 9, struct.pack("<IQ", 4, HUGE)), tensors=0, fields=1),
    "a long list of texts": header(field("k", 9, struct.pack("<IQ", 8, 1 << 24)), tensors=0, fields=1),
    "a giant text in a list": header(field("k", 9, struct.pack("<IQQ", 8, 1, HUGE)), tensors=0, fields=1),
    "a list of lists": header(field("k", 9, struct.pack("<IQ", 9, 1)) + bytes(64), tensors=0, fields=1),
    "an unknown value": header(field("k", 99, bytes(8)), tensors=0, fields=1),
    "a truth value of 7": header(field("k", 7, b"\7"), tensors=0, fields=1),
    "a key twice": header(field("k", 0, b"\1") * 2, tensors=0, fields=2),
    "alignment": header(field("general.alignment", 4, struct.pack("<I", 48)), tensors=0, fields=1),
    "alignment of 0": header(field("general.alignment", 4, bytes(4)), tensors=0, fields=1),
    "an unknown type": header(tensor("t", (32,), 250, 0), tensors=1) + bytes(256),
    "no dimensions": header(tensor("t", (), 0, 0), tensors=1) + bytes(256),
    "many dimensions": header(tensor("t", (1,) * 5, 0, 0), tensors=1) + bytes(256),
    "a giant shape": header(tensor("t", (HUGE, HUGE), 0, 0), tensors=1) + bytes(256),
    "an empty shape": header(tensor("t", (0, 4), 0, 0), tensors=1) + bytes(256),
    "part of a block": header(tensor("t", (33,), 8, 0), tensors=1) + bytes(256),
    "an offset outside": header(tensor("t", (32,), 0, HUGE), tensors=1) + bytes(256),
    "a crooked offset": header(tensor("t", (32,), 0, 4), tensors=1) + bytes(512),
    "overlapping tensors": header(tensor("a", (32,), 0, 0), tensor("b", (32,), 0, 64), tensors=2) + bytes(512),
    "a tensor twice": header(tensor("a", (8,), 0, 0), tensor("a", (8,), 0, 32), tensors=2) + bytes(512),
    "not UTF-8": header(struct.pack("<Q", 1) + b"\xff" + bytes(8), tensors=0, fields=1),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(BROKEN[kind])
    with pytest.raises(GGUFError) as error:
        read_gguf(path)
    assert "\n" not in str(error.value)
    with pytest.raises(ModelError, match=r"model\.gguf"):
        resolve_any_model(str(path))


def test_every_cut_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    whole = valid()
    path.write_bytes(whole)
    assert list(read_gguf(path).tensors) == ["one", "two"]
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(GGUFError):
            read_gguf(path)


def test_random_damage_raises_nothing_else(tmp_path: Path) -> None:
    path, chance = tmp_path / "model.gguf", random.Random(0)
    whole = valid()
    ends = whole.index(b"two") + 40
    refused = 0
    for _ in range(3000):
        damaged = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(ends)] = chance.choice((0, 1, 127, 128, 255, chance.randrange(256)))
        path.write_bytes(damaged)
        try:
            found = read_gguf(path)
        except GGUFError:
            refused += 1
        else:
            assert all(0 < each.start < each.end <= len(whole) for each in found.tensors.values())
    assert 1000 < refused < 3000


def write_split(directory: Path) -> list[Path]:
    writer = gguf.GGUFWriter(directory / "m.gguf", "llama", split_max_tensors=1)
    for name in ("one", "two", "three"):
        writer.add_tensor(name, np.zeros((2, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(directory.glob("*.gguf"))


def test_parts_of_a_split_file_are_one_model(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    assert len(parts) == 3
    assert split_parts(parts[1]) == parts
    assert sorted(read_parts(parts).tensors) == ["one", "three", "two"]
    parts[2].rename(tmp_path / "other")
    with pytest.raises(GGUFError, match="lacks"):
        read_parts(parts)
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(GGUFError, match=r"split\.no"):
        read_parts(parts)


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((2, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="'mamba' is not one of llama"):
        resolve_any_model(str(tmp_path / "m.gguf"))


def test_other_models_do_not_load_the_gguf_package() -> None:
    script = "import sys, tercet.scheduler.resolved_model; print('gguf' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_directory_with_several_models_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.gguf").write_bytes(valid())
    with pytest.raises(ModelError, match=r"a\.gguf, b\.gguf"):
        resolve_any_model(str(tmp_path))
