"""`tercet doctor` works on every machine, in one line for each fact, and shows no secret."""

import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError

import pytest

from tercet.frontend.cli import doctor
from tercet.frontend.cli import main as cli

KERNELS = "torch          2.13.0\ngpu 0          H100, sm90, 80 GiB, 79 GiB free\nnative kernels avx2 (best)\n"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that the report runs, each answered without a process."""
    commands: list[list[str]] = []

    def answer(command: list[str]) -> str:
        commands.append(command)
        return KERNELS if "tercet.kernels" in command else "c++ 12.2.0\nCopyright\n"

    monkeypatch.setattr(doctor, "_run", answer)
    return commands


def without_packages(_: str) -> str:
    raise PackageNotFoundError


def test_it_says_what_is_here(run: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line[:14].strip() for line in lines]
    assert names[:8] == ["tercet", "libraries", "system", "python", "machine", "cpu flags", "memory", "disk"]
    assert {"compiler", "torch", "gpu 0", "native kernels", "environment"} <= set(names)
    assert "gpu 0          H100, sm90, 80 GiB, 79 GiB free" in lines
    assert len(lines) <= 26
    assert not [line for line in lines if "unknown:" in line]
    assert run[-1][1:] == ["-m", "tercet.kernels", "describe"]


@pytest.mark.usefixtures("run")
def test_it_shows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TERCET_API_KEYS", "TERCET_ADMIN_KEYS", "HF_TOKEN", "HF_ENDPOINT", "OPENAI_API_KEY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "s3cret")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    text = "\n".join(doctor.report())
    assert "s3cret" not in text
    assert "TERCET_API_KEYS" in text
    assert "HF_TOKEN" in text
    assert "OMP_NUM_THREADS=3" in text


@pytest.mark.usefixtures("run")
def test_what_is_not_installed_is_named_with_its_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version", without_packages)
    monkeypatch.setattr("shutil.which", lambda _: None)
    text = "\n".join(doctor.report())
    assert "not installed  tercet-kernels: computes no model" in text
    assert "not installed  tercet-scheduler: serves no model itself" in text
    assert "compiler       none: no native kernels can be built" in text
    assert "native kernels" not in text.replace("no native kernels", "")


@pytest.mark.usefixtures("run")
def test_a_system_without_proc_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_text", lambda _: "")
    monkeypatch.delattr("os.sched_getaffinity")
    assert not [line for line in doctor.report() if "unknown:" in line]


@pytest.mark.parametrize(
    "error",
    [OSError(2, "No such file"), subprocess.TimeoutExpired(["c++"], 3), RuntimeError("two\nlines"), KeyError("x")],
)
def test_a_probe_that_fails_costs_one_line(error: Exception) -> None:
    def broken() -> Iterator[doctor.Finding]:
        yield "first", "works"
        raise error

    def other() -> Iterator[doctor.Finding]:
        yield "other", "a\nb" + "c" * 1000

    first, fault, last = doctor.report({"broken": broken, "other": other})
    assert first == "first          works"
    assert fault.startswith("broken         unknown: ")
    assert last.startswith("other          a bccc")
    assert len(last) < 300
    assert "\n" not in fault + last


def test_a_program_that_fails_gives_its_last_line() -> None:
    with pytest.raises(RuntimeError, match="sh ended with 3: worse"):
        doctor._run(["sh", "-c", "echo bad >&2; echo worse >&2; exit 3"])
    with pytest.raises(RuntimeError, match="it printed nothing"):
        doctor._run(["true"])
    assert doctor._run(["echo", "here"]) == "here\n"
