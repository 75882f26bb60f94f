"""Sources of suites: packages of pip and npm, and repositories. Nothing of them is copied into this repository."""

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

_LONGEST = 1800.0
"""Seconds that a download may take."""


def install(folder: Path, *packages: str) -> None:
    """Install Python packages, without their dependencies, into a folder."""
    _run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *packages])


def source_distribution(
    folder: Path, package: str, *, flags: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> None:
    """Unpack the source distribution of a Python package, which may have its tests, into a folder."""
    downloads = folder / "download"
    options = ["--quiet", "--no-deps", "--no-binary", package.partition("==")[0], *flags, "--dest", str(downloads)]
    _run([sys.executable, "-m", "pip", "download", *options, package], env=env)
    [archive] = downloads.iterdir()
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    shutil.rmtree(downloads)
    [unpacked] = folder.iterdir()
    for each in unpacked.iterdir():
        each.rename(folder / each.name)


def install_node(folder: Path, *packages: str) -> None:
    """Install npm packages into a folder."""
    _run(["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), *packages])


def clone(folder: Path, repository: str) -> None:
    """Clone the newest commit of a GitHub repository."""
    _run(["git", "clone", "--quiet", "--depth", "1", f"https://github.com/{repository}", str(folder)])


def installed_version(package: str) -> str:
    """Return the requirement for the version of a package that is installed here."""
    return f"{package}=={version(package)}"


def _run(command: list[str], env: Mapping[str, str] | None = None) -> None:
    subprocess.run(command, check=True, timeout=_LONGEST, env={**os.environ, **(env or {})})
