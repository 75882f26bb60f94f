"""Models in the hub's cache: the list of them (`tercet models`), and downloads (`tercet pull`)."""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tercet.scheduler.formats.other_models import file_names, hub_fault
from tercet.scheduler.gguf.gguf_packages import PACKAGES
from tercet.scheduler.gguf_models import resolve_any_model
from tercet.scheduler.model_files import KNOWN_NAMES, ModelError, check_model, check_tokenizer, resolve_model

_UNITS = ("B", "kB", "MB", "GB", "TB")


@dataclass(frozen=True, slots=True)
class StoredModel:
    """Model on this machine."""

    name: str
    """Name that MODEL takes."""
    size: int
    """Bytes on the disk."""
    fault: str = ""
    """Reason why it cannot be served; empty if it may be."""

    def line(self, width: int) -> str:
        """Return its line in a list with names of this width."""
        return f"{self.name:{width}}  {readable_size(self.size):>8}" + (f"  {self.fault}" if self.fault else "")


def readable_size(size: int) -> str:
    """Return a number of bytes with its unit, as in "1.2 GB"."""
    value, unit = float(size), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if value >= 99.5 or not unit else f"{value:.1f} {_UNITS[unit]}"


def stored_models() -> list[StoredModel]:
    """Return the embedded model, those from packages and those in the hub's cache, by name.

    Raises ModelError for an unreadable cache.
    """
    return [*_embedded(), *_packaged(), *sorted(_cached(), key=lambda model: model.name)]


def _embedded() -> Iterator[StoredModel]:
    try:
        path = resolve_model("embedded")
    except ModelError:  # an installation may leave it out
        return
    yield StoredModel("embedded", sum(file.stat().st_size for file in path.iterdir() if file.is_file()))


def _packaged() -> Iterator[StoredModel]:
    for name, package in PACKAGES.items():
        if package.stored.is_file():
            yield StoredModel(name, package.stored.stat().st_size)


def _cached() -> Iterator[StoredModel]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return
    except (OSError, ValueError) as error:
        raise ModelError(f"the hub's cache cannot be read: {error}") from error
    for repo in cache.repos:
        if repo.repo_type != "model":
            continue
        newest = max(repo.revisions, key=lambda revision: revision.last_modified, default=None)
        fault = "its download has not ended" if newest is None else hub_fault(file_names(newest.snapshot_path))
        yield StoredModel(repo.repo_id, repo.size_on_disk, fault)


def pull(name: str) -> Path:
    """Download a model and check its files. Raises ModelError.

    Progress is shown on standard error. After an interrupted download, only missing files are downloaded.
    """
    if os.path.exists(name):
        raise ModelError(f"{name!r} is on this machine, and needs no download")
    path = resolve_any_model(name)
    check_model(path)
    check_tokenizer(path)
    return path


def print_models() -> None:
    """Print the list of models, and the short names of others."""
    models = stored_models()
    width = max((len(model.name) for model in models), default=0)
    for model in models:
        sys.stdout.write(model.line(width) + "\n")
    sys.stdout.write(f"names for `tercet pull`, beside Hugging Face ids: {', '.join([*PACKAGES, *KNOWN_NAMES])}\n")


def print_pulled(name: str) -> None:
    """Download a model, and print its size and how to serve it. Raises ModelError."""
    path = pull(name)
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    sys.stdout.write(f"{KNOWN_NAMES.get(name, name)}: {readable_size(size)}, ready for `tercet serve {name}`\n")
