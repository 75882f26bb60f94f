"""The services of deploy/compose.yaml without containers: their own command lines on the hosts of a `Network`."""

import json
import sys
from pathlib import Path
from typing import Any

from tests.deploy_files import compose
from tests.namespaces import Network

URL = "http://frontend:8000"
"""Where clients find the frontend."""

_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
"""Threads that wait for one another are slow where other processes want the same cores, as here."""


class ComposeServer:
    """Parts on hosts named after them: `scheduler-1` runs the service `scheduler`."""

    def __init__(self, network: Network, directory: Path) -> None:
        self.network = network
        self._directory = directory
        self._services = compose()["services"]
        keys = self._services["keys"]
        self.keys = [self._here(word, "") for word in (*keys["entrypoint"], *keys["command"])]

    def start(self, host: str) -> None:
        """Start the part whose host this is. Kubernetes names peers after pods, as this does after hosts."""
        part = host.partition("-")[0]
        words = [self._here(word, part) for word in self._services[part]["command"]]
        words += ["--peer", host]
        if part == "scheduler":
            words += ["--dtype", "float32", "--kv-cache-bytes", str(64 * 2**20)]
        with (self._directory / f"{host}.log").open("w") as log:
            self.network.start(host, self._program(f"tercet-{part}"), *words, env=_ENVIRONMENT, stdout=log)

    def healthy(self, host: str) -> bool:
        """What the health check of the service says."""
        assert self.network.processes[host].poll() is None, self.logs()
        return self.network.call(host, *self.health_command(host)).returncode == 0

    def health_command(self, host: str) -> list[str]:
        """The health check of the service."""
        part = host.partition("-")[0]
        program, *words = self._services[part]["healthcheck"]["test"][1:]
        return [self._program(program), *(self._here(word, part) for word in words)]

    def get(self, path: str) -> str:
        """What the frontend answers a client."""
        code = "import sys, urllib.request as u; sys.stdout.write(u.urlopen(sys.argv[1], timeout=5).read().decode())"
        done = self.network.call("client", sys.executable, "-c", code, URL + path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def info(self) -> dict[str, Any]:
        """What the frontend says of itself, and of whom it knows."""
        info: dict[str, Any] = json.loads(self.get("/server_info"))
        return info

    def schedulers(self) -> int:
        """How many the frontend knows."""
        return len(self.info()["schedulers"])

    def logs(self) -> str:
        """The end of what every part said."""
        logs = sorted(self._directory.glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in logs)

    def _here(self, word: str, part: str) -> str:
        """A word of a command with the folders that the mounts of volumes stand for."""
        if word == "tercet":
            return self._program(word)
        word = word.replace("/state/", f"{self._directory / 'state'}/")
        return word.replace("/keys", str(self._directory / "keys" / part))

    def _program(self, name: str) -> str:
        return str(Path(sys.executable).with_name(name))
