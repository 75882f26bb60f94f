"""CURVE keys for tcp://: one pair for each role, and the keys that each process holds.

A process holds the secret of its own role and the public keys of all. An inbox admits only holders of those keys, and a
process can claim no other role than that of its key.
"""

import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import zmq
from zmq.utils import z85

from tercet.protocol.errors import KeysError
from tercet.protocol.messages.values import Role

SECRET = "secret"  # noqa: S105 - a file's name
"""File of a role's own secret; the public keys are beside it, as `<role>.public`."""

_LENGTH = 40
"""Characters of a key in Z85."""


@dataclass(frozen=True)
class Security:
    """Keys of one process, in Z85."""

    role: Role
    secret: bytes = field(repr=False)
    publics: Mapping[Role, bytes]

    @classmethod
    def load(cls, directory: Path | str, role: Role) -> Self:
        """Return the keys in a role's folder, as `keys.write_keys` makes it. Raises KeysError naming the file.

        The secret must not be readable by other users; if it belongs to root, a group may read it, since container
        platforms hand secrets to unprivileged processes that way.
        """
        folder = Path(directory)
        _check_private(folder / SECRET)
        secret = _read(folder / SECRET)
        publics = {each: _read(public_path(folder, each)) for each in Role}
        if len(set(publics.values())) < len(publics):
            raise KeysError(f"{folder}: two roles have the same public key")
        if zmq.curve_public(secret) != publics[role]:
            owner = next((each.value for each in Role if zmq.curve_public(secret) == publics[each]), "no role here")
            raise KeysError(f"{folder / SECRET} is the secret of {owner}, not of {role.value}")
        return cls(role, secret, publics)

    @property
    def public(self) -> bytes:
        """Public key of this process's own role."""
        return self.publics[self.role]

    def role_of(self, key: bytes) -> Role | None:
        """Return the role of a public key, given as its 32 bytes, or None."""
        return next((role for role, public in self.publics.items() if z85.decode(public) == key), None)

    def may_claim(self, key: Role | None, claimed: Role) -> bool:
        """Return whether the holder of a role's key may claim the role `claimed`.

        Our own key may also claim to be a supervisor: health probes have no other key.
        """
        return key is not None and (key is claimed or (key is self.role and claimed is Role.SUPERVISOR))


def public_path(folder: Path, role: Role) -> Path:
    """Return the path of a role's public key."""
    return folder / f"{role.value}.public"


def _check_private(path: Path) -> None:
    """Refuse a secret that others can access, by PostgreSQL's rule for key files."""
    try:
        status = path.stat()
    except OSError as error:
        raise KeysError(f"{path}: {error.strerror}") from error
    others = stat.S_IRWXG | stat.S_IRWXO
    if status.st_uid == 0 != os.geteuid():
        others &= ~stat.S_IRGRP
    if not stat.S_ISREG(status.st_mode) or status.st_mode & others:
        raise KeysError(f"{path} is within others' reach (mode {stat.S_IMODE(status.st_mode):04o}): use 0600")


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            key = file.read(_LENGTH + 2).strip()
        if len(key) != _LENGTH:
            raise ValueError(f"{len(key)} characters")
        if z85.encode(z85.decode(key)) != key:
            raise ValueError("no Z85")
    except OSError as error:
        raise KeysError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, struct.error) as error:
        raise KeysError(f"{path} holds no key: {_LENGTH} characters of Z85 are due") from error
    return key
