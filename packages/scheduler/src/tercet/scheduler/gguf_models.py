"""Models in GGUF files, as directories that all other code reads: a file, a directory with one, or one of a hub."""

import re
from pathlib import Path

from tercet.scheduler.gguf.gguf_packages import packaged_gguf
from tercet.scheduler.gguf.gguf_paths import SUFFIX, GGUFError, find_gguf, split_parts
from tercet.scheduler.model_files import HUB_TIMEOUT, ModelError, download_config, resolve_model

_HUB_FILE = re.compile(
    rf"(?:hf:)?(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*):(?P<file>[\w./ -]+{re.escape(SUFFIX)})"
)


def resolve_any_model(name: str) -> Path:
    """Return the directory of a model in GGUF (also one of `PACKAGES`) or in safetensors; see `resolve_model`.

    Raise ModelError.
    """
    try:
        found = _find(name)
        return resolve_model(name) if found is None else _directory(found)
    except GGUFError as error:
        raise ModelError(str(error)) from None


def _find(name: str) -> Path | None:
    """Return the GGUF file that a name stands for; None if it stands for anything else."""
    path = Path(name).expanduser()
    if not name or path.exists():
        return find_gguf(path) if name else None
    if on_hub := _HUB_FILE.fullmatch(name):
        return _download(on_hub["repository"], on_hub["file"])
    return packaged_gguf(name)


def _directory(path: Path) -> Path:
    from tercet.scheduler.gguf.gguf_directory import gguf_directory  # loads a package that other models do not need

    return gguf_directory(path)


def config_directory(name: str) -> Path:
    """Return a directory with a model's config.json, which alone is downloaded if the model is on the hub.

    Raise ModelError.
    """
    path = Path(name).expanduser()
    if name == "embedded" or path.exists() or ":" in name or packaged_gguf(name) is not None:
        return resolve_any_model(str(path.parent) if path.name == "config.json" else name)
    return download_config(name)


def served_name(name: str, directory: Path) -> str:
    """Return the name of a model in requests: that of its directory or GGUF file, or the one it has on a hub."""
    path = Path(name).expanduser()
    if path.is_file():
        return split_parts(path)[0].stem
    if path.is_dir():
        return directory.name if (path / "config.json").exists() else path.resolve().name
    return name


def _download(repository: str, file: str) -> Path:
    """Return the path of a file of a hub's repository, after downloading it with its other parts. Raise ModelError."""
    from huggingface_hub import hf_hub_download

    path = Path(file)
    try:
        found = [Path(hf_hub_download(repository, str(part), etag_timeout=HUB_TIMEOUT)) for part in split_parts(path)]
    except Exception as error:  # each transport that the hub library has used has its own exception tree
        raise ModelError(f"{file} of {repository} cannot be downloaded ({type(error).__name__})") from error
    return found[0]
