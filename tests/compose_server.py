"""Services of deploy/compose.yaml without containers: their own command lines on the hosts of a `Network`."""

import json
import sys
from pathlib import Path
from typing import Any

from tests.deploy_files import compose
from tests.namespaces import Network

URL = "http://frontend:8000"
"""URL of the frontend for clients."""

_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
"""One thread per part: threads that wait for one another are slow when other processes use the same cores."""


class ComposeServer:
    """Parts on hosts named after them: `scheduler-1` runs the service `scheduler`."""

    def __init__(self, network: Network, directory: Path) -> None:
        self.network = network
        self._directory = directory
        self.services = compose()["services"]
        keys = self.services["keys"]
        self.keys = self._command("keys", *keys["entrypoint"], *keys["command"])

    def start(self, host: str) -> None:
        """Start the part of a host. Peers are named after hosts, as Kubernetes names them after pods."""
        with (self._directory / f"{host}.log").open("w") as log:
            self.network.start(host, *self.start_command(host), env=_ENVIRONMENT, stdout=log)

    def start_command(self, host: str) -> list[str]:
        """Return the command of the service, with options that keep tests small and comparable."""
        part = host.partition("-")[0]
        words = [*self.services[part]["command"], "--peer", host]
        if part == "scheduler":
            words += ["--dtype", "float32", "--kv-cache-bytes", str(64 * 2**20)]
        return self._command(host, f"tercet-{part}", *words)

    def healthy(self, host: str) -> bool:
        """Return whether the service's health check passes."""
        assert self.network.processes[host].poll() is None, self.logs()
        return self.network.call(host, *self.health_command(host)).returncode == 0

    def health_command(self, host: str) -> list[str]:
        """Return the command of the service's health check."""
        part = host.partition("-")[0]
        return self._command(host, *self.services[part]["healthcheck"]["test"][1:])

    def get(self, path: str) -> str:
        """Return the frontend's response to a client."""
        code = "import sys, urllib.request as u; sys.stdout.write(u.urlopen(sys.argv[1], timeout=5).read().decode())"
        done = self.network.call("client", sys.executable, "-c", code, URL + path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def info(self) -> dict[str, Any]:
        """Return the frontend's /server_info."""
        info: dict[str, Any] = json.loads(self.get("/server_info"))
        return info

    def schedulers(self) -> int:
        """Return the number of schedulers that the frontend knows."""
        return len(self.info()["schedulers"])

    def logs(self) -> str:
        """Return the last output of every part."""
        logs = sorted(self._directory.glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in logs)

    def _command(self, host: str, program: str, *words: str) -> list[str]:
        """Return a command line for a host, with local folders in place of the volumes' mount points."""
        folder = self._directory / "keys"
        keys = folder if host == "keys" else folder / host.partition("-")[0]
        local = [word.replace("/state/", f"{self._directory / 'state'}/").replace("/keys", str(keys)) for word in words]
        return [str(Path(sys.executable).with_name(program)), *local]
