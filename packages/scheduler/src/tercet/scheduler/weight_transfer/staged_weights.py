"""Weights that arrive in parts, staged as a checkpoint on disk: a restart, other ranks and other schedulers read it."""

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

from tercet.protocol.messages.codec import Frame
from tercet.protocol.system.claimed_directory import claim, remove_unclaimed
from tercet.protocol.system.private_files import make_private_directory
from tercet.scheduler.model_files import ModelError, StoredTensor, read_header, reading, weight_files

_COPY_BYTES = 16 << 20
_MOST_VALUES = 1 << 20
"""Most values of a tensor in one reply."""

_Place = tuple[Path, StoredTensor]


class StagedWeights:
    """Parts of one update, and the checkpoints made of them. Parts survive a restart of the process.

    A checkpoint's directory and file are named by a hash of its content, so that its fingerprint covers every byte.
    """

    def __init__(self, state: Callable[[], Path], peer: str) -> None:
        """Create the stage of a scheduler. `state` returns the state directory, or raises ValueError.

        It is called when the first part arrives, because it fails for a user without a home.
        """
        self._state = state
        self._name = re.sub(r"[^\w.-]", "_", peer)
        self._claimed: int | None = None
        """Descriptor of the locked file, once the directory is claimed."""

    @property
    def _directory(self) -> Path:
        return self._state() / "weights" / self._name

    @property
    def _parts(self) -> Path:
        return self._directory / "parts"

    def _lock(self) -> None:
        """Claim the directory until the process ends. Raises ModelError if another process uses it."""
        if self._claimed is not None:
            return
        try:
            self._claimed = claim(self._directory)
        except BlockingIOError:
            raise ModelError(f"another server stages weights in {self._directory}: give --state-dir") from None

    def add(self, part: int, files: Sequence[Frame]) -> None:
        """Store a part: safetensors files. Part 0 begins an update; an unfinished one ends with an error.

        Raises ModelError, and then adds nothing.
        """
        with reading(str(self._parts)):
            self._lock()
            held = sum(1 for _ in self._parts.glob("part-*"))
            if part == 0 and held:
                shutil.rmtree(self._parts, ignore_errors=True)
                raise ModelError(f"{held} parts of an unfinished update were dropped: send all parts again")
            if part != held:
                raise ModelError(f"it has {held} of the {part} parts before this one: send all parts again")
            new = _emptied(self._parts / "new")
            for number, content in enumerate(files):
                path = new / f"{number}.safetensors"
                path.write_bytes(content)
                read_header(path)
            new.rename(self._parts / f"part-{part}")

    def complete(self, base: Path) -> Path:
        """Return the directory of a checkpoint: the tensors of all parts, and those of `base` without a replacement.

        The parts are removed. Raises ModelError.
        """
        with reading(str(self._directory)):
            arrived = sorted(self._parts.glob("part-*/*.safetensors"), key=_arrival)
            before = weight_files(base) if any(base.glob("*.safetensors")) else []
            places = {
                name: (path, tensor) for path in (*before, *arrived) for name, tensor in read_header(path).items()
            }
            new = _emptied(self._parts / "new")
            sha256 = _write(new / "weights", places)[:16]
            file = (new / "weights").rename(new / f"weights-{sha256}.safetensors")
            index = {"weight_map": dict.fromkeys(places, file.name)}
            (new / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
            final = self._directory / sha256
            if final.exists():
                shutil.rmtree(new)
            else:
                new.rename(final)
            shutil.rmtree(self._parts)
            return final

    def remove_others(self, *kept: Path) -> None:
        """Remove the checkpoints except these."""
        with suppress(ValueError):
            for path in self._directory.glob("*"):
                if path not in (self._parts, *kept) and path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)

    def remove_checkpoint(self, path: Path) -> None:
        """Remove a checkpoint that cannot be loaded, if it is one of the staged."""
        with suppress(ValueError):
            if path.parent == self._directory:
                shutil.rmtree(path, ignore_errors=True)

    def remove_unfinished(self) -> None:
        """Remove the parts of an unfinished update, and everything if there is no checkpoint."""
        with suppress(ValueError):
            shutil.rmtree(self._parts, ignore_errors=True)
            if not any(path.is_dir() for path in self._directory.glob("*")):
                self.remove()

    def close(self) -> None:
        """Let another process claim the directory."""
        if self._claimed is not None:
            os.close(self._claimed)
            self._claimed = None

    def remove(self) -> None:
        """Remove everything, unless another process uses the directory."""
        self.close()
        with suppress(ValueError):
            remove_unclaimed(self._directory)


def rows_of(directory: Path, name: str, rows: int) -> str:
    """Return the JSON of the first rows of a tensor in the files of a model, as float32. Raises ModelError."""
    from tercet.scheduler.models.weights.tensor_files import open_tensors

    for path in weight_files(directory):
        tensor = read_header(path).get(name)
        if tensor is None:
            continue
        shape = (min(rows, tensor.shape[0]), *tensor.shape[1:]) if tensor.shape else ()
        if math.prod(shape) > _MOST_VALUES:
            raise ModelError(f"{rows} rows of {name} are more than {_MOST_VALUES} values: lower truncate_size")
        with open_tensors(path) as file:
            values = file.get_tensor(name).float()
            return json.dumps((values[:rows] if shape else values).tolist())
    raise ModelError(f"the weights have no tensor {name!r}")


def _emptied(directory: Path) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    make_private_directory(directory)
    return directory


def _arrival(path: Path) -> tuple[int, int]:
    return int(path.parent.name.removeprefix("part-")), int(path.stem)


def _write(target: Path, places: Mapping[str, _Place]) -> str:
    """Write tensors into one safetensors file. Return the SHA-256 of its content.

    The largest items come first, and the header's length is a multiple of 8, so that every tensor is aligned.
    """
    digest, end, header = hashlib.sha256(), 0, {}
    ordered = sorted(places.items(), key=lambda item: (-_item_bytes(item[1][1]), item[0]))
    for name, (_, tensor) in ordered:
        start, end = end, end + tensor.end - tensor.start
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with target.open("xb") as file:
        for piece in chain((len(text).to_bytes(8, "little"), text), _pieces(place for _, place in ordered)):
            digest.update(piece)
            file.write(piece)
    return digest.hexdigest()


def _item_bytes(tensor: StoredTensor) -> float:
    return (tensor.end - tensor.start) / max(math.prod(tensor.shape), 1)


def _pieces(places: Iterable[_Place]) -> Iterator[bytes]:
    """Yield the bytes of tensors, in pieces."""
    for path, tensor in places:
        with path.open("rb") as file:
            file.seek(tensor.start)
            left = tensor.end - tensor.start
            while left:
                piece = file.read(min(left, _COPY_BYTES))
                if not piece:
                    raise ModelError(f"{path} was cut off while it was read")
                left -= len(piece)
                yield piece
