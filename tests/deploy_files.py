"""Contents of the files in deploy/: images, the commands they run, and the packages they contain."""

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
PARTS = ("frontend", "scheduler", "detokenizer")
MONITORING = ("prometheus", "grafana")
"""Services of compose.yaml that run third-party images."""
INBOX_PORTS = {"frontend": 30000, "scheduler": 30100, "detokenizer": 30200}


class Dockerfile:
    """Instructions of one image, with those of its last stage separate."""

    def __init__(self, part: str) -> None:
        self.path = DEPLOY / "docker" / f"{part}.Dockerfile"
        lines = [line for line in self.path.read_text().splitlines() if not line.startswith("#")]
        joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
        self.instructions = [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line]
        last = max(number for number, (name, *_) in enumerate(self.instructions) if name == "FROM")
        self.final = dict(each for each in self.instructions[last:] if len(each) == 2)

    def values(self, name: str) -> list[str]:
        """Return the arguments of every instruction of a name, in all stages."""
        return [rest[0] for instruction, *rest in self.instructions if instruction == name]

    def entrypoint(self) -> list[str]:
        """Return the program of a container."""
        return list(json.loads(self.final["ENTRYPOINT"]))

    def command(self) -> list[str]:
        """Return the command of a container."""
        return self.entrypoint() + list(json.loads(self.final["CMD"]))

    def health_command(self) -> list[str]:
        """Return the command of the health check."""
        return list(json.loads(self.final["HEALTHCHECK"].partition("CMD ")[2]))

    def installs(self) -> list[set[str]]:
        """Return the packages of this repository that each pip command installs."""
        runs = [set(re.findall(r"(?<!site-)packages/([a-z]+)", run)) for run in self.values("RUN")]
        return [packages for packages in runs if packages]

    def copies(self) -> set[str]:
        """Return the packages of this repository that are copied in."""
        return {found[1] for copy in self.values("COPY") if (found := re.match(r"packages/([a-z]+)", copy))}


@cache
def compose(file: str = "compose.yaml") -> dict[str, Any]:
    """Return a compose file with the values of deploy/.env for its variables."""
    values = dict(
        line.split("=", 1) for line in (DEPLOY / ".env").read_text().splitlines() if line[:1] not in {"", "#"}
    )
    text = re.sub(r"\$\{(\w+):-([^}]*)\}", lambda found: values.get(found[1], found[2]), (DEPLOY / file).read_text())
    assert "$" not in text, "a variable without a default"
    parsed: dict[str, Any] = yaml.safe_load(text)
    return parsed


def part_of(service: str) -> str:
    """Return the part that a service of a compose file runs."""
    return "scheduler" if service == "ranks" else service.removesuffix("-gpu")


def manifests(kind: str) -> dict[str, dict[str, Any]]:
    """Return the Kubernetes objects of a kind, by name."""
    return {each["metadata"]["name"]: each for each in _objects() if each["kind"] == kind}


def kubernetes_files() -> list[Path]:
    """Return all files of deploy/kubernetes except the kustomization."""
    return sorted(path for path in (DEPLOY / "kubernetes").glob("*.yaml") if path.name != "kustomization.yaml")


def kustomization(directory: str) -> dict[str, Any]:
    """Return deploy/<directory>/kustomization.yaml."""
    parsed: dict[str, Any] = yaml.safe_load((DEPLOY / directory / "kustomization.yaml").read_text())
    return parsed


def pod(part: str) -> dict[str, Any]:
    """Return the pod of a part's Deployment."""
    spec: dict[str, Any] = manifests("Deployment")[part]["spec"]["template"]["spec"]
    return spec


def container(part: str) -> dict[str, Any]:
    """Return the only container of that pod."""
    (only,) = pod(part)["containers"]
    assert isinstance(only, dict)
    return only


def host_pods() -> dict[str, dict[str, Any]]:
    """Return the pods of the LeaderWorkerSet of a model on several hosts, by the name of their template."""
    objects = yaml.safe_load_all((DEPLOY / "kubernetes-hosts" / "scheduler.yaml").read_text())
    (found,) = [each for each in objects if each["kind"] == "LeaderWorkerSet"]
    spec = found["spec"]["leaderWorkerTemplate"]
    return {name: spec[name] for name in ("leaderTemplate", "workerTemplate")}


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield every command line in deploy/ with its place."""
    for part in PARTS:
        yield f"{part}.Dockerfile", Dockerfile(part).command()
        yield f"{part}.Dockerfile, health", Dockerfile(part).health_command()
        yield f"kubernetes {part}", [f"tercet-{part}", *container(part)["args"]]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if "exec" in container(part)[probe]:
                yield f"kubernetes {part}, {probe}", container(part)[probe]["exec"]["command"]
    for name, template in host_pods().items():
        yield f"kubernetes-hosts {name}", ["tercet-scheduler", *template["spec"]["containers"][0]["args"]]
    for name, service in compose()["services"].items():
        if name in MONITORING:
            continue
        entry = service.get("entrypoint") or [f"tercet-{part_of(name)}"]
        yield f"compose {name}", [*entry, *service["command"]]
        if "test" in service["healthcheck"]:
            yield f"compose {name}, health", service["healthcheck"]["test"][1:]
    for name, service in compose("compose-hosts.yaml")["services"].items():
        yield f"compose-hosts {name}", [f"tercet-{part_of(name)}", *service["command"]]
        yield f"compose-hosts {name}, health", service["healthcheck"]["test"][1:]
    for number, line in enumerate((DEPLOY / "README.md").read_text().splitlines(), 1):
        if (words := shlex.split(line, comments=True) if line.startswith("    ") else []) and words[0] == "tercet":
            yield f"README.md:{number}", words


def option(command: list[str], name: str) -> str:
    """Return the value of an option, in either notation."""
    for position, word in enumerate(command):
        if word == name:
            return command[position + 1]
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    raise AssertionError(f"no {name} in {command}")


def declared_closure(part: str) -> set[str]:
    """Return the packages of this repository that a part needs, by the dependencies in pyproject.toml files."""
    project = tomllib.loads((ROOT / "packages" / part / "pyproject.toml").read_text())["project"]
    found = {part}
    for requirement in project["dependencies"]:
        if sibling := re.match(r"tercet-([a-z]+)", requirement):
            found |= declared_closure(sibling[1])
    return found


@cache
def _objects() -> list[dict[str, Any]]:
    return [each for path in kubernetes_files() for each in yaml.safe_load_all(path.read_text())]
