"""The directory that stands for a GGUF file: config.json and tokenizer files beside links to the file's parts."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tercet.scheduler.formats import sentencepiece_tokenizer
from tercet.scheduler.gguf.gguf_config import FACTOR_TENSORS, gguf_config
from tercet.scheduler.gguf.gguf_file import GGUFFile, GGUFTensor, map_file, read_gguf, read_parts
from tercet.scheduler.gguf.gguf_paths import SUFFIX, GGUFError, cache_folder, split_parts
from tercet.scheduler.gguf.gguf_tensors import CheckpointTensor, checkpoint_tensors
from tercet.scheduler.gguf.gguf_tokenizer import GGUFTokenizer
from tercet.scheduler.gguf.gguf_values import float_values


def gguf_directory(path: Path) -> Path:
    """Return the directory that stands for a GGUF file, made by the first call. Raise GGUFError.

    It lies in the user's cache. Its name changes with the file, and with the code that makes it.
    """
    parts = [part.resolve() for part in split_parts(path.absolute())]
    place = _cache() / f"{path.stem[:100]}-{_key(parts)}"
    if (place / "config.json").is_file():
        return place
    file = read_parts(parts)
    files = _files(parts, file)
    made = Path(tempfile.mkdtemp(prefix=".making-", dir=place.parent))
    try:
        for name, content in files.items():
            (made / name).parent.mkdir(exist_ok=True)
            (made / name).write_bytes(content)
        for number, part in enumerate(parts, 1):
            (made / f"model-{number:05}-of-{len(parts):05}{SUFFIX}").symlink_to(part)
        made.rename(place)
    except OSError:
        if not (place / "config.json").is_file():  # else another process was first
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return place


def stored_tensors(path: Path) -> dict[str, CheckpointTensor]:
    """Return the checkpoint tensors of a file in a `gguf_directory`, by name. Raise GGUFError."""
    try:
        config = json.loads((path.parent / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise GGUFError(f"{path}: its config.json cannot be read: {type(error).__name__}") from None
    return checkpoint_tensors(read_gguf(path).tensors, config)


def _cache() -> Path:
    """Return the folder of these directories; a temporary one if the user's cache cannot be written."""
    place = cache_folder("gguf")
    with suppress(OSError):
        place.mkdir(parents=True, exist_ok=True)
    return place if os.access(place, os.W_OK) else Path(tempfile.mkdtemp(prefix="tercet-gguf-"))


def _key(parts: list[Path]) -> str:
    digest = hashlib.sha256()
    for folder in (Path(__file__).parent, Path(sentencepiece_tokenizer.__file__).parent):
        for source in sorted(folder.glob("*.py")):
            digest.update(source.read_bytes())
    for part in parts:
        try:
            found = part.stat()
        except OSError as error:
            raise GGUFError(f"{part} cannot be read: {error.strerror}") from None
        digest.update(f"{part} {found.st_size} {found.st_mtime_ns} {found.st_ino}".encode())
    return digest.hexdigest()[:16]


def _files(parts: list[Path], file: GGUFFile) -> dict[str, bytes]:
    """Return the contents of the directory's files by name."""
    path = parts[0]
    config = gguf_config(file, _factors(parts, file), path)
    tokenizer = GGUFTokenizer(file.metadata, path)
    config |= tokenizer.named_ids()
    checkpoint_tensors(file.tensors, config)  # raises for tensors that are not known
    ends = tokenizer.end_ids()
    generation = {"eos_token_id": ends} if ends else {}
    return {
        **tokenizer.files(),
        "generation_config.json": _json(generation),
        "config.json": _json(config),
    }


def _factors(parts: list[Path], file: GGUFFile) -> dict[str, list[float]]:
    """Return the values of tensors that belong into the config."""
    wanted = [name for name in FACTOR_TENSORS if name in file.tensors]
    found: dict[str, list[float]] = {}
    for part in parts if wanted else []:
        tensors: Mapping[str, GGUFTensor] = read_gguf(part).tensors if len(parts) > 1 else file.tensors
        for name in wanted:
            if name in tensors:
                tensor = tensors[name]
                with map_file(part) as data:
                    values = float_values(data, tensor.type, tensor.shape, tensor.start, tensor.end)
                found[name] = [float(f"{value:.9g}") for value in values.reshape(-1).tolist()]
    return found


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=1).encode()
