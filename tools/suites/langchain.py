"""LangChain's standard tests of chat models (`langchain-tests`), with `langchain-openai` and its two APIs."""

from pathlib import Path

from tools.suites.pytest_run import SHIMS, run_pytest
from tools.suites.sources import install
from tools.suites.suite import Outcome, Suite, Target

_PACKAGES = ("langchain-tests", "syrupy", "vcrpy", "pytest-recording", "pytest-benchmark", "pytest-codspeed", "wrapt")


def fetch(folder: Path) -> None:
    install(folder, *_PACKAGES, "pytest-socket")


def run(folder: Path, target: Target) -> list[Outcome]:
    """Run the standard tests. `langchain-openai` itself is a dependency of this project's tests."""
    tests = str(SHIMS / "langchain_models.py")
    settings = ("asyncio_mode=auto", *(f"asyncio_default_{kind}_loop_scope=session" for kind in ("fixture", "test")))
    options = [flag for setting in settings for flag in ("-o", setting)]
    return run_pytest(target, ["-W", "default", "--rootdir", str(folder), *options, tests], folder, path=[folder])


SUITE = Suite("langchain", "LangChain standard tests", fetch, run)
