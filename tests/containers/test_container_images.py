"""Images as built: sizes, configuration, and files."""

import logging
import os
import stat
from pathlib import Path

import pytest

from tests.containers.conftest import Images
from tests.containers.container_server import USER
from tests.deploy_files import PARTS, Dockerfile

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

logger = logging.getLogger(__name__)

MB = 1_000_000
LIMITS = {"frontend": 125, "detokenizer": 75, "scheduler": 1050}
"""MB that each image adds to its base image, which has about 125 MB itself."""
COMPILERS = {"as", "cc", "c++", "cpp", "g++", "gcc", "ld", "make"}
OWN_FOLDERS = {"frontend": ["keys", "state"], "detokenizer": ["keys"], "scheduler": ["keys", "kernels", "models"]}
ACCOUNTS = {"etc/group", "etc/gshadow", "etc/passwd", "etc/shadow", "etc/subgid", "etc/subuid"}


def files(root: Path) -> set[str]:
    """Return the paths of everything below a directory, without following links."""
    return {
        str(Path(folder, name).relative_to(root)) for folder, *names in os.walk(root) for each in names for name in each
    }


@pytest.mark.parametrize("part", PARTS)
def test_sizes_stay_within_limits(images: Images, part: str) -> None:
    added = images.buildah.added_bytes(part) / MB
    logger.info("%s: built in %.0f s, %.0f MB added to the base image", part, images.seconds[part], added)
    assert added < LIMITS[part]


@pytest.mark.parametrize("part", PARTS)
def test_configurations_are_those_of_the_dockerfiles(images: Images, part: str) -> None:
    config, dockerfile = images.buildah.config(part), Dockerfile(part)
    assert config["User"] == f"{USER}:{USER}"
    assert config["Entrypoint"] + config["Cmd"] == dockerfile.command()
    assert config["Healthcheck"]["Test"] == ["CMD", *dockerfile.health_command()]
    assert set(config["ExposedPorts"]) == {f"{port}/tcp" for port in dockerfile.final["EXPOSE"].split()}
    assert not any(name in str(config["Env"]) for name in ("PIP_", "INDEX"))
    labels = {name.removeprefix("org.opencontainers.image."): value for name, value in config["Labels"].items()}
    assert (labels["title"], labels["licenses"]) == (f"tercet-{part}", "Apache-2.0")


@pytest.mark.parametrize("part", PARTS)
def test_nothing_of_the_build_is_left(images: Images, part: str) -> None:
    added = files(images.roots[part]) - files(images.base) - images.buildah.left_by_builds
    outside = {path for path in added if not path.startswith("opt/tercet")}
    assert {path for path in outside if path.removesuffix("-") not in ACCOUNTS} == set(OWN_FOLDERS[part])
    assert not {path for path in added if Path(path).name in COMPILERS | {"pip"}}
    assert not {path for path in added if path.endswith((".whl", ".tar.gz", ".o"))}
    assert not {path for path in added if "/site-packages/tercet/" in path and path.endswith((".cpp", ".h"))}


@pytest.mark.parametrize("part", PARTS)
def test_the_user_owns_no_program(images: Images, part: str) -> None:
    root = images.roots[part]
    for path in (root / "opt/tercet").rglob("*"):
        status = path.lstat()
        assert (status.st_uid, status.st_gid) == (0, 0), path
        assert stat.S_ISLNK(status.st_mode) or not status.st_mode & (stat.S_ISUID | stat.S_ISGID | stat.S_IWOTH), path
    for name in OWN_FOLDERS[part]:
        status = (root / name).stat()
        assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (USER, USER, 0o700)


@pytest.mark.parametrize("part", PARTS)
def test_licenses_come_with_every_package(images: Images, part: str) -> None:
    own = list((images.roots[part] / "opt/tercet/lib").glob("python3*/site-packages/tercet_*.dist-info"))
    assert len(own) == len(Dockerfile(part).copies())
    assert all((each / "licenses" / "LICENSE").is_file() for each in own)
