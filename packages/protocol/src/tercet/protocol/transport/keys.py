"""Generator of a server's CURVE keys: a folder for each role, for the processes of that role only."""

import os
from collections.abc import Mapping
from pathlib import Path

import zmq

from tercet.protocol.errors import KeysError
from tercet.protocol.messages.values import Role
from tercet.protocol.system.private_files import PRIVATE_DIRECTORY, PRIVATE_FILE, make_private_directory, open_private
from tercet.protocol.transport.security import SECRET, Security, public_path


def write_keys(directory: Path | str, *, force: bool = False) -> list[Path]:
    """Make a key pair for each role; return the folders `directory/<role>`, each with its secret and all public keys.

    Raises KeysError if keys exist already, unless `force` replaces them, and if a file cannot be written.
    """
    root = Path(directory)
    folders = {role: root / role.value for role in Role}
    if not force and (present := [folder for folder in folders.values() if (folder / SECRET).exists()]):
        raise KeysError(f"{present[0]} holds keys already: with new ones the parts that run could not talk to others")
    pairs = {role: zmq.curve_keypair() for role in Role}
    files = {public_path(folder, other): public for folder in folders.values() for other, (public, _) in pairs.items()}
    files |= {folder / SECRET: pairs[role][1] for role, folder in folders.items()}
    try:
        for folder in folders.values():
            make_private_directory(folder)
            folder.chmod(PRIVATE_DIRECTORY)
        _write_all(files)
    except OSError as error:
        raise KeysError(f"{error.filename or root}: {error.strerror}") from error
    return list(folders.values())


def have_keys(directory: Path | str) -> bool:
    """Return whether all roles' keys exist. Raises KeysError if some are missing or they do not fit together."""
    root = Path(directory)
    if not any((root / role.value / SECRET).exists() for role in Role):
        return False
    found = [Security.load(root / role.value, role) for role in Role]
    if any(each.publics != found[0].publics for each in found):
        raise KeysError(f"{root}: the folders hold keys of different sets")
    return True


def _write_all(files: Mapping[Path, bytes]) -> None:
    """Write all files, or none if the disk is full. No other user can read one at any moment. Raises OSError."""
    parts = {path: path.with_name(f".{path.name}.part") for path in files}
    try:
        for path, key in files.items():
            parts[path].unlink(missing_ok=True)
            with os.fdopen(open_private(parts[path], os.O_WRONLY | os.O_EXCL), "wb") as file:
                os.fchmod(file.fileno(), PRIVATE_FILE)
                file.write(key + b"\n")
        for path, part in parts.items():
            part.replace(path)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)
