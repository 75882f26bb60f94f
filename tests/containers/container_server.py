"""Services of deploy/compose.yaml in containers of the built images, each on a host of a `Network`."""

import os
import signal
from pathlib import Path
from typing import Any

import psutil

from tests.compose_server import ComposeServer
from tests.containers.buildah import Buildah
from tests.deploy_files import Dockerfile
from tests.namespaces import Network

USER = 10001
"""User and group of the images."""


class ContainerServer(ComposeServer):
    """Parts by compose's own commands, with compose's volumes as folders on this machine."""

    def __init__(self, network: Network, directory: Path, buildah: Buildah) -> None:
        self._buildah = buildah
        self._volumes = directory / "volumes"
        self.roots: dict[str, Path] = {}
        super().__init__(network, directory)

    def create(self, service: str) -> None:
        """Create the service's container and its volumes, which belong to the images' user."""
        image, _, _ = self.services[service]["image"].partition(":")
        self.roots[service] = self._buildah.create(image, service)
        for folder in {self._volumes / volume["source"] for volume in self.services[service]["volumes"]}:
            if not folder.exists():
                folder.mkdir(mode=0o700, parents=True)
                os.chown(folder, USER, USER)

    def start_command(self, host: str) -> list[str]:
        return self._command(host, *Dockerfile(host).entrypoint(), *self.services[host]["command"])

    def image_health_command(self, host: str) -> list[str]:
        """Return the command of the image's own health check."""
        return self._command(host, *Dockerfile(host).health_command())

    def main_process(self, host: str) -> psutil.Process:
        """Return the first process of a container."""
        command = ["/opt/tercet/bin/python", f"/opt/tercet/bin/tercet-{host}"]
        inside = psutil.Process(self.network.processes[host].pid).children(recursive=True)
        return next(each for each in inside if each.cmdline()[:2] == command)

    def stop(self, host: str) -> int:
        """Stop a container as container engines do, by the image's signal; return its exit status."""
        self.main_process(host).send_signal(signal.Signals[self._buildah.config(host)["StopSignal"]])
        return self.network.processes[host].wait(timeout=60)

    def _command(self, host: str, program: str, *words: str) -> list[str]:
        volumes = [self._mount(each) for each in self.services[host]["volumes"]]
        return self._buildah.command(host, volumes, program, *words)

    def _mount(self, volume: dict[str, Any]) -> str:
        """Return a volume's folder, mount point and access."""
        folder = self._volumes / volume["source"] / volume.get("volume", {}).get("subpath", "")
        return f"{folder}:{volume['target']}:{'ro' if volume.get('read_only') else 'rw'}"
