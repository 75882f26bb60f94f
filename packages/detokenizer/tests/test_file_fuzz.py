"""Fuzz of damaged tokenizers: the detokenizer reads each, or refuses it in one line."""

import subprocess
import sys
from pathlib import Path

import pytest

from packages.detokenizer.tests.conftest import MAKERS, vocabulary_of


def fuzz(kind: str, directory: Path, *, count: int, seconds: float, first: int = 0) -> None:
    """Run the program and expect success."""
    sample = directory / "tokenizer.json"
    vocabulary_of(kind).tokenizer.save(str(sample))
    command = [sys.executable, "-m", "packages.detokenizer.tests.file_fuzz", str(sample), str(first), str(count)]
    ended = subprocess.run([*command, str(seconds)], capture_output=True, text=True, timeout=seconds + 120, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert " refused\n" in ended.stdout


@pytest.mark.parametrize("kind", ["byte_level", "llama"])
def test_damaged_tokenizers_are_read_or_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    fuzz(kind, tmp_path, count=500, seconds=4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(MAKERS))
def test_many_damaged_tokenizers(kind: str, tmp_path: Path) -> None:
    fuzz(kind, tmp_path, count=1_000_000, seconds=20, first=10_000)
