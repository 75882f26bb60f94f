"""Paths of GGUF files: the file of a model in a directory, and the files that one model is split into.

This module imports no other package, because every start asks whether its model is a GGUF file.
"""

import os
import re
from pathlib import Path

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_PROJECTOR = "mmproj"
"""The beginning of names of files that read images, which are not read."""
_SPLIT = re.compile(r"(?P<name>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf")


class GGUFError(ValueError):
    """A file that is no valid GGUF file, or one that cannot be served. The message is one line."""


def cache_folder(name: str) -> Path:
    """Return a folder of the user's cache, which need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "tercet" / name


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file that a path names, or the only one of a directory without a config.json.

    Return None for anything else. Raise GGUFError for a directory with several models.
    """
    if path.is_file():
        return path if path.suffix == SUFFIX or _begins_as_gguf(path) else None
    if not path.is_dir() or (path / "config.json").exists():
        return None
    models = {split_parts(file)[0] for file in path.glob(f"*{SUFFIX}") if not file.name.startswith(_PROJECTOR)}
    if len(models) > 1:
        names = ", ".join(sorted(model.name for model in models)[:8])
        raise GGUFError(f"{path} holds several models, name one of its files: {names}")
    return next(iter(models), None)


def _begins_as_gguf(path: Path) -> bool:
    """Return whether a file of any name, such as a blob of ollama's, begins as GGUF files do."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def split_parts(path: Path) -> list[Path]:
    """Return all files of a model that may be split: the file itself, or name-00001-of-00003.gguf and so on."""
    split = _SPLIT.fullmatch(path.name)
    if split is None:
        return [path]
    parts = int(split["parts"])
    return [path.with_name(f"{split['name']}-{part:05}-of-{parts:05}.gguf") for part in range(1, parts + 1)]
