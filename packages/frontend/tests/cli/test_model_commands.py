"""`tercet pull` and `tercet models` run the scheduler's commands."""

import sys
from typing import ClassVar

import pytest

from tercet.frontend.cli import main as cli


class Process:
    """A process that ends with 3, after a Ctrl-C."""

    commands: ClassVar[list[list[str]]] = []

    def __init__(self, command: list[str]) -> None:
        self.commands.append(command)
        self._waits = 0

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self) -> int:
        self._waits += 1
        if self._waits == 1:
            raise KeyboardInterrupt
        return 3


def test_they_run_the_schedulers_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", Process)
    assert cli.main(["pull", "org/tiny"]) == 3
    assert cli.main(["models"]) == 3
    module = [sys.executable, "-m", "tercet.scheduler"]
    assert Process.commands == [[*module, "pull", "--", "org/tiny"], [*module, "models"]]


def test_they_need_the_schedulers_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert cli.main(["models"]) == 2
    assert capsys.readouterr().err.startswith("tercet: error: tercet-scheduler is not installed: docs/install.md")
