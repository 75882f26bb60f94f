"""Keys on disk: made whole, kept private, and refused by name where anything about them is wrong."""

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from tercet.protocol.errors import KeysError
from tercet.protocol.messages.values import Role
from tercet.protocol.transport.keys import have_keys, write_keys
from tercet.protocol.transport.security import Security

SCHEDULER = Role.SCHEDULER


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_keys(tmp_path / "keys")
    return tmp_path / "keys" / "scheduler"


def test_each_role_gets_its_own_secret_and_everybodys_public_key(tmp_path: Path) -> None:
    folders = write_keys(tmp_path / "keys")
    assert [folder.name for folder in folders] == [role.value for role in Role]
    held = {role: Security.load(tmp_path / "keys" / role.value, role) for role in Role}
    assert len({keys.secret for keys in held.values()}) == len(Role)
    for role, keys in held.items():
        assert keys.publics == held[SCHEDULER].publics
        assert zmq.curve_public(keys.secret) == keys.public == keys.publics[role]
        names = {path.name for path in (tmp_path / "keys" / role.value).iterdir()}
        assert names == {"secret", *(f"{other.value}.public" for other in Role)}
        others = {other.secret for other in held.values()} - {keys.secret}
        for path in (tmp_path / "keys" / role.value).iterdir():
            assert path.read_bytes().strip() not in others
    assert "secret" not in repr(held[SCHEDULER])
    assert held[SCHEDULER].secret.decode() not in repr(held[SCHEDULER])


def test_only_we_can_read_what_is_made(folder: Path) -> None:
    assert stat.S_IMODE((folder / "secret").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
def test_neither_folders_nor_files_are_others_to_read_whatever_the_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        folders = write_keys(tmp_path / "above" / "keys")
    finally:
        os.umask(before)
    for folder in (tmp_path / "above", tmp_path / "above" / "keys", *folders):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
    for path in (path for folder in folders for path in folder.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert have_keys(tmp_path / "above" / "keys")


def test_on_a_full_disk_the_keys_that_are_there_stay(tmp_path: Path) -> None:
    write_keys(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    code = (
        "import resource, sys\nfrom tercet.protocol.errors import KeysError\n"
        "from tercet.protocol.transport.keys import write_keys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (30, 30))\n"
        "try:\n    write_keys(sys.argv[1], force=True)\nexcept KeysError as error:\n    print(error)"
    )
    told = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert told.stdout == f"{tmp_path}: File too large\n"
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_keys_are_not_replaced_unless_forced(tmp_path: Path) -> None:
    write_keys(tmp_path)
    before = Security.load(tmp_path / "scheduler", SCHEDULER)
    with pytest.raises(KeysError, match="holds keys already"):
        write_keys(tmp_path)
    (tmp_path / "frontend" / "secret").unlink()
    with pytest.raises(KeysError, match="holds keys already"):
        write_keys(tmp_path)
    assert Security.load(tmp_path / "scheduler", SCHEDULER) == before
    write_keys(tmp_path, force=True)
    assert Security.load(tmp_path / "scheduler", SCHEDULER) != before
    assert have_keys(tmp_path)


def test_a_whole_set_is_told_from_none_and_from_part_of_one(tmp_path: Path) -> None:
    assert not have_keys(tmp_path / "keys")
    write_keys(tmp_path / "keys")
    assert have_keys(tmp_path / "keys")
    write_keys(tmp_path / "others")
    (tmp_path / "keys" / "detokenizer").rename(tmp_path / "away")
    with pytest.raises(KeysError, match="detokenizer"):
        have_keys(tmp_path / "keys")
    (tmp_path / "others" / "detokenizer").rename(tmp_path / "keys" / "detokenizer")
    with pytest.raises(KeysError, match="different sets"):
        have_keys(tmp_path / "keys")


def test_where_nothing_can_be_written_the_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "keys").touch()
    with pytest.raises(KeysError, match="keys"):
        write_keys(tmp_path / "keys")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o700 | stat.S_IXOTH])
def test_a_secret_within_others_reach_is_refused(folder: Path, mode: int) -> None:
    (folder / "secret").chmod(mode)
    with pytest.raises(KeysError, match=r"secret is within others' reach \(mode 0\d{3}\): use 0600"):
        Security.load(folder, SCHEDULER)


def test_a_secret_of_root_may_be_readable_by_the_group_it_is_handed_to(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root owns files of root")
    monkeypatch.setattr(os, "geteuid", lambda: 10001)
    (folder / "secret").chmod(0o440)
    assert Security.load(folder, SCHEDULER).role is SCHEDULER
    for mode in (0o444, 0o460):
        (folder / "secret").chmod(mode)
        with pytest.raises(KeysError, match="within others' reach"):
            Security.load(folder, SCHEDULER)


def make_folder(folder: Path) -> None:
    (folder / "secret").unlink()
    (folder / "secret").mkdir()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "secret gone": lambda folder: (folder / "secret").unlink(),
    "secret empty": lambda folder: (folder / "secret").write_bytes(b""),
    "secret short": lambda folder: (folder / "secret").write_bytes(b"a" * 39),
    "secret long": lambda folder: (folder / "secret").write_bytes(b"a" * 41),
    "secret no Z85": lambda folder: (folder / "secret").write_bytes(b'"' * 40),
    "secret not ASCII": lambda folder: (folder / "secret").write_bytes(b"\xff" * 40),
    "secret too large a number": lambda folder: (folder / "secret").write_bytes(b"#" * 40),
    "secret a folder": make_folder,
    "public gone": lambda folder: (folder / "frontend.public").unlink(),
    "public damaged": lambda folder: (folder / "frontend.public").write_bytes(b"\0" * 40),
    "public of another": lambda folder: (folder / "scheduler.public").write_bytes(zmq.curve_keypair()[0]),
    "public twice": lambda folder: (folder / "frontend.public").write_bytes(
        (folder / "detokenizer.public").read_bytes()
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_keys_fail_closed_in_one_line_that_names_the_place(folder: Path, damage: str) -> None:
    DAMAGE[damage](folder)
    with pytest.raises(KeysError) as caught:
        Security.load(folder, SCHEDULER)
    line = str(caught.value)
    assert str(folder) in line
    assert "\n" not in line
    if "public" not in damage or damage in {"public gone", "public damaged"}:
        assert str(folder / ("frontend.public" if "public" in damage else "secret")) in line


def test_another_roles_folder_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(KeysError, match="is the secret of scheduler, not of frontend"):
        Security.load(folder, Role.FRONTEND)


def test_a_key_speaks_for_its_own_role_and_a_parts_own_for_its_probe(folder: Path) -> None:
    keys = Security.load(folder, SCHEDULER)
    allowed = {(key, claimed) for key in (*Role, None) for claimed in Role if keys.may_claim(key, claimed)}
    assert allowed == {*((role, role) for role in Role), (SCHEDULER, Role.SUPERVISOR)}
