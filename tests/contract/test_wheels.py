"""Each part is built and installed alone with its dependencies: small, without torch, and able to join the others."""

import json
import os
import shutil
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from tests.part_process import ChildProcess, healthy, listener, until

ROOT = Path(__file__).parents[2]
PARTS = ("protocol", "frontend", "scheduler", "kernels", "detokenizer")
LIMITS = {"frontend": 150, "detokenizer": 60}
"""Megabytes of a part with all its dependencies, beyond Python."""
INSTALLED = [pytest.param("frontend", marks=pytest.mark.slow), "detokenizer"]

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
Environment = Callable[[str], Path]


def pip(*words: object, **environment: str) -> None:
    command = [sys.executable, "-m", "pip", *map(str, words), "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=CLEAN | environment, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheels of all five packages, built from a copy; kernels without their native library."""
    directory = tmp_path_factory.mktemp("wheels")
    ignored = shutil.ignore_patterns("tests", "__pycache__", "lib", "*.pyc")
    packages = [shutil.copytree(ROOT / "packages" / part, directory / "src" / part, ignore=ignored) for part in PARTS]
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", directory, *packages, CXX="none")
    return directory


@pytest.fixture(scope="module")
def environment(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return a factory of environments with only one part and its dependencies; it returns the folder of programs."""
    made: dict[str, Path] = {}

    def make(part: str) -> Path:
        if part not in made:
            directory = tmp_path_factory.mktemp(part) / "env"
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True, timeout=60)
            constraints = ROOT / "constraints.txt"
            pip(
                *("--python", directory / "bin" / "python", "install", "--no-compile"),
                *("--constraint", constraints, "--find-links", wheels, f"tercet-{part}"),
            )
            made[part] = directory / "bin"
        return made[part]

    return make


def installed(programs: Path) -> dict[str, str]:
    code = "import importlib.metadata as m, json; "
    code += "print(json.dumps({each.name.lower(): each.version for each in m.distributions()}))"
    done = subprocess.run([programs / "python", "-c", code], capture_output=True, text=True, check=True, env=CLEAN)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def megabytes(programs: Path) -> float:
    files = (path for path in programs.parent.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files) / 1e6


@pytest.mark.parametrize("part", PARTS)
def test_a_wheel_holds_its_portion_of_the_namespace_and_no_more(wheels: Path, part: str) -> None:
    [wheel] = wheels.glob(f"tercet_{part}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        code = [name for name in names if ".dist-info/" not in name]
    assert all(name.startswith(f"tercet/{part}/") for name in code)
    assert f"tercet/{part}/py.typed" in code
    assert f"tercet/{part}/__init__.py" in code
    with zipfile.ZipFile(wheel) as archive:
        [licence] = [name for name in names if name.endswith("/licenses/LICENSE")]
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
    assert not [name for name in code if "/tests/" in name or name.endswith((".pyc", ".cpp"))]
    assert wheel.stat().st_size < 20e6


@pytest.mark.parametrize("part", INSTALLED)
def test_a_part_installs_alone_and_stays_small(environment: Environment, part: str) -> None:
    programs = environment(part)
    found = installed(programs)
    assert {name for name in found if name.startswith("tercet-")} == {f"tercet-{part}", "tercet-protocol"}
    assert not {"torch", "transformers", "triton", "numpy", "safetensors"} & found.keys()
    assert megabytes(programs) < LIMITS[part]


@pytest.mark.parametrize("part", INSTALLED)
def test_a_part_starts_by_its_own_name(environment: Environment, part: str, tmp_path: Path) -> None:
    programs = environment(part)
    version = installed(programs)[f"tercet-{part}"]
    command = [str(programs / f"tercet-{part}"), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=CLEAN, cwd=tmp_path, timeout=60)
    assert done.stdout.strip() == version


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


class Deployment:
    """Three parts from separate environments, joined by tcp:// with keys that the frontend's package made."""

    def __init__(self, directory: Path, programs: dict[str, Path], scheduler_options: tuple[str, ...]) -> None:
        keys = directory / "keys"
        subprocess.run([programs["frontend"] / "tercet", "keys", keys], check=True, env=CLEAN, timeout=60)
        port, other_port = free_ports(2)
        self.socket, self.url = listener()
        scheduler, detokenizer = f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{other_port}"
        words: dict[str, tuple[object, ...]] = {
            "scheduler": ("--listen", scheduler, *scheduler_options),
            "detokenizer": ("--listen", detokenizer),
            "frontend": (
                *("--listen", "tcp://127.0.0.1:0", "--fd", self.socket.fileno()),
                *("--scheduler", scheduler, "--detokenizer", detokenizer),
            ),
        }
        self.parts = {
            part: ChildProcess(
                [str(programs[part] / f"tercet-{part}"), "--keys", str(keys / part), *map(str, words[part])],
                directory / f"{part}.log",
                fds=(self.socket.fileno(),) if part == "frontend" else (),
            )
            for part in words
        }
        self.probes = {
            part: [str(programs[part] / f"tercet-{part}"), "probe", "--listen", address, "--keys", str(keys / part)]
            for part, address in (("scheduler", scheduler), ("detokenizer", detokenizer))
        }
        self.probes["frontend"] = [str(programs["frontend"] / "tercet-frontend"), "probe", self.url]

    def last_output(self) -> str:
        """Return the last output of each part."""
        return "\n".join(f"--- {name}\n{part.output[-2000:]}" for name, part in self.parts.items())

    def close(self) -> None:
        self.socket.close()
        for part in self.parts.values():
            part.kill()


@pytest.fixture
def deploy(tmp_path: Path) -> Iterator[Callable[..., Deployment]]:
    made: list[Deployment] = []

    def make(programs: dict[str, Path], *scheduler_options: str) -> Deployment:
        made.append(Deployment(tmp_path, programs, scheduler_options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def serve_a_client(deployment: Deployment) -> None:
    until(lambda: healthy(deployment.url), deployment.last_output)
    for part, probe in deployment.probes.items():
        assert subprocess.run(probe, check=False, timeout=60, env=CLEAN).returncode == 0, part
    with OpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        model = client.models.list().data[0].id
        answer = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "Hello"}], max_tokens=8, temperature=0
        )
        assert answer.usage is not None
        assert answer.choices[0].message.content
        stream = client.completions.create(model=model, prompt="One, two,", max_tokens=8, temperature=0, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
    for process in deployment.parts.values():
        assert process.stop() == 0, deployment.last_output()


@pytest.mark.slow
def test_parts_of_their_own_environments_serve_together_over_tcp_with_keys(
    environment: Environment, deploy: Callable[..., Deployment]
) -> None:
    """The scheduler is that of the tests' own environment, with a model that costs nothing."""
    programs = {part: environment(part) for part in LIMITS} | {"scheduler": Path(sys.executable).parent}
    serve_a_client(deploy(programs, "--executor", "fake"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_scheduler_installs_alone_and_serves_its_own_model(
    environment: Environment, deploy: Callable[..., Deployment]
) -> None:
    programs = {part: environment(part) for part in (*LIMITS, "scheduler")}
    found = {name for name in installed(programs["scheduler"]) if name.startswith("tercet-")}
    assert found == {"tercet-scheduler", "tercet-kernels", "tercet-protocol"}
    serve_a_client(deploy(programs, "--kv-cache-bytes", str(64 * 2**20)))
