"""Five distributions share one namespace, depend on each other by range, and keep their limits of size and API.

Run this file to print the public names after an intended change.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PARTS = ("protocol", "frontend", "scheduler", "kernels", "detokenizer")
HEAVY = {"torch", "transformers", "triton", "safetensors", "tercet.scheduler", "tercet.kernels"}

API = Path(__file__).with_name("public_api.txt")
API_MODULES = (
    "protocol/src/tercet/protocol/**/*.py",
    "frontend/src/tercet/frontend/engine/engine.py",
    "scheduler/src/tercet/scheduler/ports.py",
    "scheduler/src/tercet/scheduler/testing/*.py",
    "kernels/src/tercet/kernels/attention/api.py",
    "kernels/src/tercet/kernels/attention/latent.py",
    "kernels/src/tercet/kernels/device.py",
)
"""Modules that another package or a user's program may import."""


def project(part: str) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "packages" / part / "pyproject.toml").read_text())["project"]
    return found


def version(part: str) -> str:
    scope: dict[str, str] = {}
    for node in ast.parse((source(part) / "__about__.py").read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            scope[node.targets[0].id] = ast.literal_eval(node.value)
    return scope["__version__"]


def source(part: str) -> Path:
    return ROOT / "packages" / part / "src" / "tercet" / part


@pytest.mark.parametrize("part", PARTS)
def test_no_portion_claims_the_namespace(part: str) -> None:
    assert not (source(part).parent / "__init__.py").exists()
    assert [path.name for path in source(part).parent.iterdir() if path.name != "__pycache__"] == [part]
    assert (source(part) / "__init__.py").exists()


@pytest.mark.parametrize("part", PARTS)
def test_every_portion_is_typed(part: str) -> None:
    assert (source(part) / "py.typed").read_text() == ""


def test_the_namespace_holds_all_five() -> None:
    code = f"import importlib; [importlib.import_module('tercet.' + part) for part in {PARTS!r}]; import tercet"
    code += "; print(tercet.__file__, len(tercet.__path__))"
    assert run(code).split()[0] == "None"


def siblings(part: str) -> Iterator[Requirement]:
    declared = project(part)
    optional = [each for extra in declared.get("optional-dependencies", {}).values() for each in extra]
    for line in (*declared.get("dependencies", ()), *optional):
        if (requirement := Requirement(line)).name.startswith("tercet-"):
            yield requirement


@pytest.mark.parametrize("part", PARTS)
def test_siblings_are_required_by_ranges_that_admit_them(part: str) -> None:
    for requirement in siblings(part):
        sibling = requirement.name.removeprefix("tercet-")
        assert requirement.specifier.contains(version(sibling)), f"{requirement} does not admit {version(sibling)}"
        operators = {each.operator for each in requirement.specifier}
        assert operators == {">=", "<"}, f"{requirement} is no range"
        major, minor, *_ = map(int, version(sibling).split("."))
        assert not requirement.specifier.contains(f"{major}.{minor + 1}.0"), f"{requirement} has no cap"


def test_parts_require_only_the_siblings_they_may_import() -> None:
    required = {
        part: {each.name.removeprefix("tercet-") for each in siblings(part) if each.name != "tercet-frontend"}
        for part in PARTS
    }
    assert required["protocol"] == required["kernels"] == set()
    assert required["detokenizer"] == {"protocol"}
    assert required["scheduler"] == {"protocol", "kernels"}
    mandatory = {Requirement(each).name for each in project("frontend")["dependencies"]}
    assert {name for name in mandatory if name.startswith("tercet-")} == {"tercet-protocol"}


def test_the_oldest_environment_has_the_oldest_there_may_be() -> None:
    pins = [Requirement(line) for line in (ROOT / "constraints-oldest.txt").read_text().splitlines() if line[0] != "#"]
    pinned = {pin.name: next(iter(pin.specifier)).version for pin in pins}
    for part in ("kernels", "scheduler"):
        extras = project(part)["optional-dependencies"].values()
        for wanted in map(Requirement, [*project(part)["dependencies"], *(each for extra in extras for each in extra)]):
            if wanted.name in {"torch", "transformers", "triton"}:
                lowest = next(each.version for each in wanted.specifier if each.operator == ">=")
                assert pinned[wanted.name] == f"{lowest}.0"


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.mark.parametrize(
    "module",
    [
        "tercet.frontend",
        "tercet.frontend.__main__",
        "tercet.frontend.wiring",
        "tercet.frontend.cli.main",
        "tercet.frontend.supervisor.serve",
        "tercet.frontend.engine.engine",
        "tercet.detokenizer",
        "tercet.detokenizer.__main__",
        "tercet.detokenizer.loop",
        "tercet.protocol.probe",
    ],
)
def test_parts_without_a_model_load_no_torch(module: str) -> None:
    loaded = set(run(f"import sys, {module}; print(*sys.modules)").split())
    assert module in loaded
    assert not HEAVY & loaded


def test_the_protocol_stands_on_msgspec_and_zmq_alone() -> None:
    names = " ".join(f"tercet.protocol.{path.stem}," for path in source("protocol").glob("[a-z]*.py")).rstrip(",")
    before = set(run("import sys, zmq, msgspec; print(*sys.modules)").split())
    loaded = set(run(f"import sys, {names}; print(*sys.modules)").split())
    foreign = {name.partition(".")[0] for name in loaded - before} - set(sys.stdlib_module_names)
    assert foreign - {"zmq", "msgspec"} == {"tercet"}


def public_names() -> str:
    """Return a line for each public module, with the names it defines."""
    lines = []
    for path in sorted(path for pattern in API_MODULES for path in (ROOT / "packages").glob(pattern)):
        names = sorted(name for name in _defined(path) if not name.startswith("_") and name != "logger")
        module = ".".join(path.relative_to(path.parents[len(path.parts) - path.parts.index("src") - 2]).parts)
        if names:
            lines.append(f"{module.removesuffix('.py')}: {' '.join(names)}")
    return "\n".join(lines) + "\n"


def _defined(path: Path) -> Iterator[str]:
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name


def test_public_names_are_unchanged() -> None:
    """A removed or changed name needs a new minor version of its package; a new one is listed in its CHANGELOG."""
    listed = dict(line.split(": ", 1) for line in API.read_text().splitlines())
    there = dict(line.split(": ", 1) for line in public_names().splitlines())
    gone = {
        module: missing
        for module, names in listed.items()
        if (missing := set(names.split()) - set(there.get(module, "").split()))
    }
    assert not gone, "public names are gone"
    assert there == listed, f"public names are new: python {Path(__file__).relative_to(ROOT)} > {API.relative_to(ROOT)}"


def test_every_part_can_be_started_by_name() -> None:
    scripts = {script for part in PARTS for script in project(part).get("scripts", {})}
    assert scripts == {"tercet", "tercet-frontend", "tercet-scheduler", "tercet-detokenizer", "tercet-kernels"}


def test_no_name_is_patched_by_a_string() -> None:
    """A string outlives the name that it means. Pass an argument, or patch an attribute of an imported object."""
    ours = re.compile(r"\b(?:setattr|delattr|patch)\(\s*f?[\"'](?:tercet|tools|tests|benchmarks)\.")
    roots = [ROOT / name for name in ("packages", "tools", "tests", "benchmarks")]
    files = [path for root in roots for path in root.rglob("*.py")]
    assert [str(path.relative_to(ROOT)) for path in files if ours.search(path.read_text(encoding="utf-8"))] == []


if __name__ == "__main__":
    sys.stdout.write(public_names())
