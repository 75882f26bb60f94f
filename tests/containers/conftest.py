"""Fixtures: images built once for all tests of the folder."""

import time
from collections.abc import Iterator

import pytest

from tests.containers.buildah import BASE, Buildah, why_not
from tests.deploy_files import PARTS


class Images:
    """Built images, with a container of each to look into."""

    def __init__(self, buildah: Buildah) -> None:
        self.buildah = buildah
        self.seconds: dict[str, float] = {}
        buildah.make_base()
        self.base = buildah.create(BASE, "base-content")
        for part in PARTS:
            began = time.monotonic()
            buildah.build(part)
            self.seconds[part] = time.monotonic() - began
        self.roots = {part: buildah.create(f"tercet-{part}", f"{part}-content") for part in PARTS}


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    if reason := why_not():
        pytest.skip(reason)
    buildah = Buildah(tmp_path_factory.mktemp("buildah"))
    try:
        yield Images(buildah)
    finally:
        buildah.close()
