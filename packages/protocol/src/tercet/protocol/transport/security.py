"""Who may talk to whom over tcp://: CURVE keys, one pair for each role, and what each part holds of them.

A part holds the secret of its own role and the public keys of all. An inbox lets in holders of those keys alone, and a
process can claim no other role than the one whose key it holds.
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
"""File of a role's own secret; `<role>.public` beside it are the public keys."""

_LENGTH = 40
"""Characters of a key in Z85."""


@dataclass(frozen=True)
class Security:
    """The keys of one part, in Z85."""

    role: Role
    secret: bytes = field(repr=False)
    publics: Mapping[Role, bytes]

    @classmethod
    def load(cls, directory: Path | str, role: Role) -> Self:
        """Return the keys in a role's folder, as `keys.write_keys` makes it. Raises KeysError naming the file.

        Nobody else may be able to read the secret; one that belongs to root may be readable by a group, as container
        platforms hand secrets to processes that are not root.
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
        """The part's own."""
        return self.publics[self.role]

    def role_of(self, key: bytes) -> Role | None:
        """Whose public key this is, given as its 32 bytes."""
        return next((role for role, public in self.publics.items() if z85.decode(public) == key), None)

    def may_claim(self, key: Role | None, claimed: Role) -> bool:
        """Whether the holder of a role's key may say it is of the role `claimed`.

        The holder of our own key is our probe, which has no other; it may look on, as a supervisor does.
        """
        return key is not None and (key is claimed or (key is self.role and claimed is Role.SUPERVISOR))


def public_path(folder: Path, role: Role) -> Path:
    """Where a role's public key lies."""
    return folder / f"{role.value}.public"


def _check_private(path: Path) -> None:
    """PostgreSQL's rule for key files."""
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
