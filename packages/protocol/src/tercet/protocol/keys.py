"""Makes the keys of a server: a folder for each role, to be handed to the parts of that role alone."""

import os
from pathlib import Path

import zmq

from tercet.protocol.errors import KeysError
from tercet.protocol.security import SECRET, Security, public_path
from tercet.protocol.values import Role


def write_keys(directory: Path | str, *, force: bool = False) -> list[Path]:
    """Make a pair for each role; returns the folders `directory/<role>`, each with its role's secret and all publics.

    Raises KeysError if there are keys already, unless `force` replaces them, and where nothing can be written.
    """
    root = Path(directory)
    folders = {role: root / role.value for role in Role}
    if not force and (present := [folder for folder in folders.values() if (folder / SECRET).exists()]):
        raise KeysError(f"{present[0]} holds keys already: with new ones the parts that run could not talk to others")
    pairs = {role: zmq.curve_keypair() for role in Role}
    try:
        for role, folder in folders.items():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
            for other, (public, _) in pairs.items():
                _write(public_path(folder, other), public, 0o644)
            _write(folder / SECRET, pairs[role][1], 0o600)
    except OSError as error:
        raise KeysError(f"{error.filename}: {error.strerror}") from error
    return list(folders.values())


def have_keys(directory: Path | str) -> bool:
    """Whether every role's keys are there, and fit. Raises KeysError if only some are, or they do not fit together."""
    root = Path(directory)
    if not any((root / role.value / SECRET).exists() for role in Role):
        return False
    found = [Security.load(root / role.value, role) for role in Role]
    if any(each.publics != found[0].publics for each in found):
        raise KeysError(f"{root}: the folders hold keys of different sets")
    return True


def _write(path: Path, key: bytes, mode: int) -> None:
    """In one piece, and never for a moment readable by more than `mode` says."""
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(key + b"\n")
    part.replace(path)
