"""Network of hosts on one machine: one namespace each, joined by a bridge, with links that can be cut."""

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TypeVar

STOP_LIMIT = 60.0
_HOSTS = Path("/etc/netns")
_NAMESPACES = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_T = TypeVar("_T")


def why_not() -> str:
    """Return why namespaces are unavailable here; empty if they are available."""
    missing = [tool for tool in ("ip", "bridge") if shutil.which(tool) is None]
    if missing:
        return f"no command {' or '.join(missing)}"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    name = f"tercet-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode == 0:
        tried = subprocess.run(["ip", "netns", "exec", name, "true"], capture_output=True, text=True, check=False)
        subprocess.run(["ip", "netns", "delete", name], check=True)
        made = tried
    return made.stderr.strip()


class Network:
    """Hosts by name, each with an address of its own, isolated from this machine's network."""

    def __init__(self, addresses: Mapping[str, str], aliases: Mapping[str, Iterable[str]]) -> None:
        """Create the network. `aliases` maps a name, as in DNS, to its hosts."""
        self.addresses = dict(addresses)
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self._prefix = f"tercet-{os.getpid()}"
        self._switch = f"{self._prefix}-switch"
        self._run("ip", "netns", "add", self._switch)
        self._run("ip", "-n", self._switch, "link", "add", "switch", "type", "bridge")
        self._run("ip", "-n", self._switch, "link", "set", "switch", "up")
        for number, (host, address) in enumerate(self.addresses.items()):
            self._add(host, address, f"port{number}")
        self.resolve(aliases)

    def resolve(self, aliases: Mapping[str, Iterable[str]]) -> None:
        """Replace the aliases on every host."""
        lines = ["127.0.0.1 localhost"]
        lines += [f"{self.addresses[host]} {name}" for name, hosts in aliases.items() for host in hosts]
        for host in self.addresses:
            # Written in place, because it is mounted over /etc/hosts for the processes of the host.
            (self._etc(host) / "hosts").write_text("\n".join(lines) + "\n")

    def start(
        self,
        host: str,
        *command: str,
        env: Mapping[str, str] | None = None,
        stdin: int | None = None,
        stdout: int | IO[str] | None = None,
    ) -> None:
        """Start a command on a host, one at a time."""
        self.processes[host] = subprocess.Popen(
            self._inside(host, *command),
            env={**os.environ, **(env or {})},
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def call(self, host: str, *command: str, limit: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end."""
        return subprocess.run(self._inside(host, *command), capture_output=True, text=True, check=False, timeout=limit)

    def on(self, host: str, work: Callable[[], _T]) -> _T:
        """Return the result of `work` in a new thread whose sockets, and its threads' sockets, belong to a host."""

        def enter() -> None:
            with (_NAMESPACES / self._name(host)).open() as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), f"setns to the namespace of {host}")

        with ThreadPoolExecutor(1, initializer=enter) as thread:
            return thread.submit(work).result()

    def cut(self, one: str, other: str) -> None:
        """Block all packets between two hosts; other links are unaffected."""
        for host in (one, other):
            self._isolate(host, "on")

    def mend(self, one: str, other: str) -> None:
        """Restore the link between two hosts."""
        for host in (one, other):
            self._isolate(host, "off")

    def close(self) -> dict[str, int]:
        """Send SIGTERM to every process, remove the network, and return the exit codes."""
        with ExitStack() as last:
            last.callback(self._remove)
            for process in self.processes.values():
                last.callback(process.wait)
                last.callback(process.kill)
                process.terminate()
            end = time.monotonic() + STOP_LIMIT
            return {host: process.wait(max(0.0, end - time.monotonic())) for host, process in self.processes.items()}

    def _remove(self) -> None:
        with ExitStack() as last:
            for name in (self._switch, *map(self._name, self.addresses)):
                last.callback(self._run, "ip", "netns", "delete", name)
            for host in self.addresses:
                last.callback(shutil.rmtree, self._etc(host))

    def _add(self, host: str, address: str, port: str) -> None:
        name = self._name(host)
        self._etc(host).mkdir(parents=True)
        self._run("ip", "netns", "add", name)
        self._run(*f"ip -n {self._switch} link add {port} type veth peer name eth0 netns {name}".split())
        self._run(*f"ip -n {self._switch} link set {port} master switch alias {host} up".split())
        self._run(*f"ip -n {name} address add {address}/24 dev eth0".split())
        for device in ("lo", "eth0"):
            self._run("ip", "-n", name, "link", "set", device, "up")

    def _isolate(self, host: str, state: str) -> None:
        """Set the bridge port's isolation: isolated ports reach all ports except isolated ones."""
        port = f"port{list(self.addresses).index(host)}"
        self._run("bridge", "-n", self._switch, "link", "set", "dev", port, "isolated", state)

    def _inside(self, host: str, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self._name(host), *command]

    def _name(self, host: str) -> str:
        return f"{self._prefix}-{host}"

    def _etc(self, host: str) -> Path:
        return _HOSTS / self._name(host)

    def _run(self, *command: str) -> None:
        subprocess.run(command, check=True, timeout=30)
