"""Reader of GGUF files, memory-mapped. Every count, size and offset is checked before it is used.

The reader of the `gguf` package is not used: it trusts the file, and needs 20 seconds for a vocabulary of 262,144
tokens.
"""

import mmap
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from tercet.scheduler.gguf.gguf_paths import GGUFError

VERSIONS = (2, 3)
_MOST_FIELDS = 1 << 16
_MOST_TENSORS = 1 << 17
_MOST_ELEMENTS = 1 << 24
"""Maximum length of an array in the metadata. The largest vocabularies have a sixtieth of it."""
_LONGEST_KEY = 1 << 12
_LONGEST_TEXT = 1 << 26  # bytes
_LONGEST_NAME = 255
_MOST_DIMENSIONS = 4
_LARGEST_ALIGNMENT = 1 << 20
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The struct code of each type of a value."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Location of a tensor: `start` and `end` are byte offsets into the file."""

    name: str
    type: str
    """The type of its values or blocks, such as Q4_K."""
    shape: tuple[int, ...]
    """Sizes, the last one contiguous: a matrix is [outputs, inputs]."""
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """The metadata and the tensors of one file."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]


class _Header:
    """A cursor in the mapped file."""

    def __init__(self, data: mmap.mmap, size: int) -> None:
        self.data, self.size, self.at = data, size, 0

    def scalar(self, code: str) -> Any:
        if code == "?" and self.at < self.size and self.data[self.at] > 1:
            raise GGUFError("a truth value is neither 0 nor 1")
        try:
            (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        except struct.error:
            raise GGUFError("the file ends within its header") from None
        self.at += struct.calcsize(f"<{code}")
        return value

    def text(self, most: int) -> str:
        length = self.scalar("Q")
        if length > most:
            raise GGUFError(f"a text of {length} bytes in the header is longer than {most}")
        if length > self.size - self.at:
            raise GGUFError("the file ends within its header")
        start, self.at = self.at, self.at + length
        try:
            return self.data[start : self.at].decode()
        except UnicodeDecodeError:
            raise GGUFError("a text in the header is not UTF-8") from None

    def texts(self, count: int) -> list[str]:
        """Read the same as `count` times `text`, faster."""
        data, at, size = self.data, self.at, self.size
        found = []
        for _ in range(count):
            start = at + 8
            at = start + int.from_bytes(data[at:start], "little")
            if at > size or start > size:
                raise GGUFError("the file ends within a list of texts, or a text's length is wrong")
            found.append(data[start:at])
        self.at = at
        return [text.decode(errors="replace") for text in found]  # a token may end within a character

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text(_LONGEST_TEXT)
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise GGUFError(f"a value has the unknown type {kind}")
        return self.scalar(_SCALARS[kind])

    def array(self) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if count > _MOST_ELEMENTS:
            raise GGUFError(f"a list of {count} values in the header is longer than {_MOST_ELEMENTS}")
        if kind == _STRING:
            return self.texts(count)
        if kind not in _SCALARS:
            raise GGUFError(f"a list has values of the type {kind}, which is unknown or not supported")
        code = f"<{count}{_SCALARS[kind]}"
        try:
            values = struct.unpack_from(code, self.data, self.at)
        except struct.error:
            raise GGUFError("the file ends within its header") from None
        self.at += struct.calcsize(code)
        return list(values)


def read_gguf(path: Path) -> GGUFFile:
    """Return the metadata and tensors of a file. Raise GGUFError for anything that is not valid."""
    try:
        with map_file(path) as data:
            return _parse(data, len(data))
    except GGUFError as error:
        raise GGUFError(f"{path}: {error}") from None
    except OSError as error:
        raise GGUFError(f"{path} cannot be read: {error.strerror}") from None


def map_file(path: Path) -> mmap.mmap:
    """Map a regular file. Opening never blocks."""
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(opened)
        if not stat.S_ISREG(found.st_mode):
            raise GGUFError("not a regular file")
        if found.st_size < 24:
            raise GGUFError("the file ends within its header")
        return mmap.mmap(opened, found.st_size, access=mmap.ACCESS_READ)
    finally:
        os.close(opened)


def _parse(data: mmap.mmap, size: int) -> GGUFFile:
    header = _Header(data, size)
    if data[:4] != b"GGUF":
        raise GGUFError("not a GGUF file: it does not begin with GGUF")
    header.at = 4
    version, tensors, fields = header.scalar("I"), header.scalar("Q"), header.scalar("Q")
    if version not in VERSIONS:
        raise GGUFError(f"GGUF version {version} is not supported, only {' and '.join(map(str, VERSIONS))}")
    if tensors > _MOST_TENSORS or fields > _MOST_FIELDS:
        raise GGUFError(f"{tensors} tensors and {fields} fields are more than {_MOST_TENSORS} and {_MOST_FIELDS}")
    metadata: dict[str, Any] = {}
    for _ in range(fields):
        key = header.text(_LONGEST_KEY)
        if key in metadata:
            raise GGUFError(f"{key[:200]} is there twice")
        metadata[key] = header.value(header.scalar("I"))
    entries = [_tensor_entry(header) for _ in range(tensors)]
    return GGUFFile(metadata, _located(entries, metadata, header.at, size))


def _tensor_entry(header: _Header) -> GGUFTensor:
    """Read a tensor's entry; its offsets are still relative to the data."""
    name = header.text(_LONGEST_NAME)
    dimensions = header.scalar("I")
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise GGUFError(f"{name}: {dimensions} dimensions instead of 1 to {_MOST_DIMENSIONS}")
    shape = tuple(header.scalar("Q") for _ in range(dimensions))[::-1]
    kind, start = header.scalar("I"), header.scalar("Q")
    try:
        found = GGMLQuantizationType(kind)
    except ValueError:
        raise GGUFError(f"{name}: the type {kind} of its values is unknown") from None
    block, block_bytes = GGML_QUANT_SIZES[found]
    if prod(shape) >= 1 << 63 or 0 in shape:
        raise GGUFError(f"{name}: the shape {list(shape)} is impossible")
    if shape[-1] % block:
        raise GGUFError(f"{name}: rows of {shape[-1]} values are no blocks of {block}")
    return GGUFTensor(name, found.name, shape, start, start + prod(shape) // block * block_bytes)


def _located(
    entries: list[GGUFTensor], metadata: Mapping[str, Any], header_end: int, size: int
) -> dict[str, GGUFTensor]:
    """Return the tensors with offsets into the file, in their order there."""
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= _LARGEST_ALIGNMENT or alignment & (alignment - 1):
        raise GGUFError(f"general.alignment: {str(alignment)[:40]} is no power of two up to {_LARGEST_ALIGNMENT}")
    data = -(-header_end // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    last = data
    for entry in sorted(entries, key=lambda tensor: tensor.start):
        start, end = data + entry.start, data + entry.end
        if entry.start % alignment:
            raise GGUFError(f"{entry.name}: its offset {entry.start} is no multiple of {alignment}")
        if start < last:
            raise GGUFError(f"{entry.name}: it overlaps with another tensor")
        if end > size:
            raise GGUFError(f"{entry.name}: it ends at byte {end} of {size}: was the download cut off?")
        if entry.name in tensors:
            raise GGUFError(f"{entry.name} is there twice")
        tensors[entry.name] = GGUFTensor(entry.name, entry.type, entry.shape, start, end)
        last = end
    return tensors


def read_parts(paths: list[Path]) -> GGUFFile:
    """Return the metadata of the first file and the tensors of all. Raise GGUFError unless they are one model's."""
    if missing := [path.name for path in paths if not path.is_file()]:
        raise GGUFError(f"{paths[0].parent} lacks {', '.join(missing[:3])}")
    files = [read_gguf(path) for path in paths]
    first = files[0].metadata
    if first.get("split.count", 1) not in (len(paths), 0):
        raise GGUFError(f"{paths[0]}: a part of {str(first['split.count'])[:20]} files, but {len(paths)} are there")
    for number, (path, file) in enumerate(zip(paths, files, strict=True)):
        if len(paths) > 1 and file.metadata.get("split.no") != number:
            raise GGUFError(f"{path}: split.no is {str(file.metadata.get('split.no'))[:20]} instead of {number}")
    tensors = dict(_unique(paths, files))
    if first.get("split.tensors.count", len(tensors)) != len(tensors):
        raise GGUFError(f"{paths[0]}: {len(tensors)} tensors instead of {str(first['split.tensors.count'])[:20]}")
    return GGUFFile(first, tensors)


def _unique(paths: list[Path], files: list[GGUFFile]) -> Iterator[tuple[str, GGUFTensor]]:
    seen: set[str] = set()
    for path, file in zip(paths, files, strict=True):
        for name, tensor in file.tensors.items():
            if name in seen:
                raise GGUFError(f"{path}: {name} is in another part, too")
            seen.add(name)
            yield name, tensor
