"""Images of deploy/docker/, built by buildah without a registry, and containers that run them.

The base image has the name that the Dockerfiles give, and is made by debootstrap from this machine's package mirror.
Its Python is Debian's. pip reaches its package index in builds by this machine's configuration.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.deploy_files import ROOT, Dockerfile

_SUITE = "bookworm"
BASE = Dockerfile("frontend").values("FROM")[0].split()[0]
_PACKAGES = ("ca-certificates", "python3", "python3-pip", "python3-venv")
_LEFT_OUT = ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/cache/apt", "var/lib/apt/lists")
"""Folders whose content slim images leave out, too."""
_PIP_OPTIONS = {"cert", "default-timeout", "extra-index-url", "find-links", "index-url", "proxy", "trusted-host"}


def why_not() -> str:
    """Return why images cannot be built here; empty if they can."""
    missing = [tool for tool in ("buildah", "debootstrap", "apt-get") if shutil.which(tool) is None]
    if missing:
        return f"no command {' or '.join(missing)}"
    return "" if os.geteuid() == 0 else "only root may build images"


class Buildah:
    """Storage of images and containers in one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.left_by_builds = {"etc/hosts"}
        """Mount points of files and folders that only builds see."""
        self._storage = ("buildah", "--root", str(directory / "storage"), "--runroot", str(directory / "run"))

    def make_base(self) -> None:
        """Make the base image of all Dockerfiles."""
        root = self._directory / "base"
        packages = ",".join(_PACKAGES)
        _run("debootstrap", "--variant=minbase", f"--include={packages}", _SUITE, str(root), _mirror())
        for each in _LEFT_OUT:
            shutil.rmtree(root / each)
            (root / each).mkdir()
        (root / "usr/bin/python").symlink_to("python3")
        made = self("from", "scratch").strip()
        self("add", "--quiet", made, str(root), "/")
        self("commit", "--quiet", "--rm", "--format", "docker", made, f"localhost/{BASE}")
        shutil.rmtree(root)

    def build(self, part: str) -> None:
        """Build the image of a part."""
        words = ["build", "--format", "docker", "--isolation", "chroot", "--pull-never", "--tag", f"tercet-{part}"]
        for source, mount_point in self._pip_files().items():
            words += ["--volume", f"{source}:{mount_point}:ro"]
            self.left_by_builds.add(str(mount_point).lstrip("/"))
        if part == "scheduler":
            words += [
                "--build-arg",
                "ACCELERATOR=cpu",
                "--build-arg",
                f"TORCH_INDEX={os.environ.get('TORCH_INDEX', '')}",
            ]
        self(*words, "--file", str(Dockerfile(part).path), str(ROOT))

    def config(self, part: str) -> dict[str, Any]:
        """Return an image's configuration, as Docker has it."""
        config: dict[str, Any] = json.loads(json.loads(self._inspect(part))["Config"])["config"]
        return config

    def added_bytes(self, part: str) -> int:
        """Return the bytes that an image adds to its base image, uncompressed."""
        layers = json.loads(json.loads(self._inspect(part))["Manifest"])["layers"]
        return sum(layer["size"] for layer in layers[1:])

    def create(self, image: str, name: str) -> Path:
        """Create a container of an image and return its root directory on this machine."""
        self("from", "--pull-never", "--name", name, f"localhost/{image}")
        return Path(self("mount", name).strip())

    def close(self) -> None:
        """Remove all containers and images."""
        self("rm", "--all")
        shutil.rmtree(self._directory)

    def command(self, container: str, volumes: list[str], *words: str) -> list[str]:
        """Return the command line that runs `words` in a container without capabilities, with a new /tmp."""
        command = [*self._options("run"), "--isolation", "chroot", "--hostname", container, "--cap-drop", "ALL"]
        command += ["--mount", "type=tmpfs,destination=/tmp", "--env", "OMP_NUM_THREADS=1"]
        for volume in volumes:
            command += ["--volume", volume]
        return [*command, container, "--", *words]

    def __call__(self, *words: str) -> str:
        return _run(*self._options(*words))

    def _options(self, *words: str) -> list[str]:
        return [*self._storage, "--storage-driver", "vfs", *words]

    def _inspect(self, part: str) -> str:
        return self("inspect", "--type", "image", f"localhost/tercet-{part}")

    def _pip_files(self) -> dict[Path, Path]:
        """Write this machine's configuration of pip; return its and its paths' mount points."""
        options: dict[str, list[str]] = {}
        for line in _run(sys.executable, "-m", "pip", "config", "list").splitlines():
            found = re.fullmatch(r".*\.([a-z-]+)='(.*)'", line)
            if found and found[1] in _PIP_OPTIONS:
                options.setdefault(found[1], []).extend(found[2].split())
        lines = [f"{name} = {' '.join(dict.fromkeys(words))}" for name, words in options.items()]
        file = self._directory / "pip.conf"
        file.write_text("\n".join(["[global]", *lines, ""]))
        words = [word for words in options.values() for word in words]
        # The pages of an index link to files beside its folder.
        paths = [Path(word.removeprefix("file://")).parent for word in words if word.startswith("file:///")]
        paths += [Path(word) for word in words if word.startswith("/")]
        return {file: Path("/etc/pip.conf"), **{path: path for path in paths}}


def _mirror() -> str:
    """Return the mirror that this machine's apt uses for the suite."""
    targets = _run("apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", f"Release: {_SUITE}")
    return targets.split()[0]


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3600)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout
