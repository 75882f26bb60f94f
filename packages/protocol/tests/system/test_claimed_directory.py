"""Directories that one process claims, and that are removed only with their mark and without a lock."""

import os
from pathlib import Path

import pytest

from tercet.protocol.system.claimed_directory import claim, remove_unclaimed


def test_a_claimed_directory_is_removed_once_its_claim_ends(tmp_path: Path) -> None:
    directory = tmp_path / "state" / "weights"
    lock = claim(directory)
    (directory / "nested").mkdir()
    (directory / "nested" / "file").write_text("x")
    with pytest.raises(BlockingIOError):
        claim(directory)
    remove_unclaimed(directory)
    assert (directory / "nested" / "file").exists()
    os.close(lock)
    os.close(claim(directory))
    remove_unclaimed(directory)
    assert not directory.exists()
    remove_unclaimed(directory)
    assert directory.parent.is_dir()


def test_other_directories_are_left_unchanged(tmp_path: Path) -> None:
    for name in ("without", "empty", "other", "link", "pipe"):
        (tmp_path / name).mkdir()
    os.close(claim(tmp_path / "claimed"))
    (tmp_path / "empty" / "lock").touch()
    (tmp_path / "other" / "lock").write_bytes((tmp_path / "claimed" / "lock").read_bytes() + b"x")
    (tmp_path / "link" / "lock").symlink_to(tmp_path / "claimed" / "lock")
    os.mkfifo(tmp_path / "pipe" / "lock")
    for path in tmp_path.iterdir():
        if path.name != "claimed":
            remove_unclaimed(path)
    assert len(list(tmp_path.iterdir())) == 6
